"""What differs between the supported versions of transformers, one function for each difference.

They look at what transformers has, not at its version number, so that a development version is judged by its code.
"""

import dataclasses
import functools
import inspect

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

OLD_CACHE = "past_key_values"
#: The name of the KV cache, as an argument of every forward and of `generate`, and in outputs: since 5.24 `cache`.
CACHE = next(field.name for field in dataclasses.fields(BaseModelOutputWithPast) if field.name in ("cache", OLD_CACHE))


def with_cache(cache: Cache | None) -> dict:
    """The keyword argument that gives this cache to a model, a layer, or `generate`."""
    return {CACHE: cache}


def cache_of(output) -> Cache | None:
    """The cache in the output of a model or of `generate`."""
    return getattr(output, CACHE)


def take_cache(kwargs: dict, paged: bool) -> Cache | None:
    """Remove the cache from the arguments of a fused attention. It may have its old name.

    The cache of continuous batching (`paged`) stays: before 5.24 it is an argument named `cache`, next to
    `past_key_values`, which is None.
    """
    if paged and CACHE != OLD_CACHE:
        return None
    return kwargs.pop(CACHE if CACHE in kwargs else OLD_CACHE, None)


def updated(cache: Cache, key: Tensor, value: Tensor, layer_idx: int, kwargs: dict) -> tuple[Tensor, Tensor]:
    """The keys and values of the cache, with these added. Since 5.24 a paged cache changes `kwargs`."""
    more = {} if CACHE == OLD_CACHE else {"kwargs": kwargs}
    return cache.update(key, value, layer_idx, **more)


def updated_if_paged(module: nn.Module, key: Tensor, value: Tensor, kwargs: dict) -> tuple[Tensor, Tensor]:
    """The same for the cache of continuous batching, before transformers' attention function is called. Before 5.24
    that function updates the cache itself."""
    return (key, value) if CACHE == OLD_CACHE else updated(kwargs.pop("cache"), key, value, module.layer_idx, kwargs)


#: The names of the cache as an argument of mixers with a recurrent state: since 5.24 the first one.
CACHES = ("cache", "cache_params", OLD_CACHE)


def cache_given(kwargs: dict) -> Cache | None:
    """The cache in the arguments of a mixer with a recurrent state."""
    return next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)


@functools.cache
def cache_argument(mixer: type) -> str:
    """The name of the cache in this class of mixers."""
    parameters = inspect.signature(mixer.forward).parameters
    return next((name for name in CACHES if name in parameters), CACHE)
