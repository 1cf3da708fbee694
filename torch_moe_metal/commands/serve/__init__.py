"""Serve a model to the clients of OpenAI's and Anthropic's APIs: editors, agents, chat windows.

The server is transformers' own (`transformers serve`). The model is loaded through this package, with its quantised
weights as they are, and patched. The server listens once the model is loaded and has generated its first tokens.
"""

import os
import socket
import sys
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec

from ..common.cli import CannotRun, at_least_0, positive
from ..common.loading import add_model, check_model, loading, say
from ..common.prefix_options import add_prefix_cache, check_prefix_cache, open_prefix_cache

KEY = "TORCH_MOE_METAL_API_KEY"
NEEDED = ("fastapi", "uvicorn", "openai", "pydantic")
LOCAL = ("127.0.0.1", "localhost", "::1")
#: The default context with continuous batching, where all requests share one cache of this length and a page. MPSGraph,
#: which computes some models' attention then, is right for at most 32,766 keys on M1 and M2 (pytorch#195163).
MAX_SHARED = 32256
EXAMPLES = """
examples:
  serve openai/gpt-oss-20b                               the published checkpoint, in MXFP4
  serve Qwen/Qwen3-30B-A3B --bits 4                      quantised to 4 bits on loading
  serve models/Qwen3-30B-A3B-Q4_K_M.gguf --context 8192  a GGUF file
  serve mlx-community/Qwen3-30B-A3B-4bit --continuous-batching

  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}], "stream": true}'
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only; 0.0.0.0: all")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes a free one")
    key = f"the key that clients must send (default: {KEY} of the environment; without one, who can connect needs none)"
    parser.add_argument("--api-key", default=os.environ.get(KEY), help=key)
    batching = "compute a token of every running request in each step; --context is the size of their shared cache"
    parallel = "answers that are computed at once, each with a cache of its own; others wait (default: 4)"
    parser.add_argument("--parallel", type=positive, default=4, metavar="N", help=parallel)
    parser.add_argument("--continuous-batching", action="store_true", help=batching)
    prefixes = "memory for the caches of earlier prompts, so that a conversation's beginning is not computed again; 0: "
    prefixes += "none (default: a quarter of the memory that is free when the model is loaded)"
    parser.add_argument("--prefix-memory", type=at_least_0, metavar="GB", help=prefixes)
    add_prefix_cache(parser)
    alias = "another name of the model that clients may send; may be repeated; '*' accepts every name"
    parser.add_argument("--alias", action="append", default=[], metavar="NAME", help=alias)
    parser.add_argument("--enable-cors", action="store_true", help="let web pages of any origin use the server")
    strict = "refuse requests with unknown fields (default: ignore them, and log each name once)"
    parser.add_argument("--strict", action="store_true", help=strict)
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")


def run(options: Namespace) -> int:
    try:
        source = check_model(options)
        check_prefix_cache(options)
        if missing := [name for name in NEEDED if find_spec(name) is None]:
            raise CannotRun(f"not installed: {', '.join(missing)}: pip install 'torch_moe_metal[serve]'")
        with listener(options.host, options.port) as listening:
            return serve(source, options, listening)
    except CannotRun as reason:
        print(f"serve: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def listener(host: str, port: int) -> socket.socket:
    """A socket, bound before the model is loaded, which takes minutes, so that a port in use fails at once."""
    if not 0 <= port < 65536:
        raise CannotRun(f"cannot listen on {host}, port {port}: expected a port from 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise CannotRun(f"cannot listen on {host}, port {port}: {error}") from error
    return bound


def serve(source, options: Namespace, listening: socket.socket) -> int:
    with loading(source.name, options.device):
        from .app import build
        from .connections import config
        from .generation import Generation
        from .model_manager import Models
        from .server import Server, warm_up

        models = Models(source, options)
        if options.continuous_batching and options.context is None:
            models.context = min(models.context, MAX_SHARED)
        prefix_memory = None if options.prefix_memory is None else options.prefix_memory * 1e9
        folder = open_prefix_cache(options, source, models.model, models.template)
        batching, parallel = options.continuous_batching, options.parallel
        generation = Generation(models.model, models.context, batching, parallel, prefix_memory, folder)
    say(models)
    say("Generating the first tokens ...")
    warm_up(models, generation)
    app = build(models, generation, options.api_key or None, options.enable_cors, options.strict, options.host)
    host, port = listening.getsockname()[:2]
    if host not in LOCAL and not options.api_key:
        say("Warning: anyone who can reach this machine can use the model. Set a key with --api-key.")
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}"
    description = f"{source.name} at {address}/v1; {address} in a browser is a page to chat with it; Ctrl-C stops it"
    Server(config(app, options.log_level), generation, description).run([listening])
    return 0
