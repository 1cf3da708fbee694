"""Speed of one layer's experts in GGML's formats, compared with llama.cpp: `python tools/peer_experts.py --types q4_k`.

It starts two processes with the same random blocks, activations and routes. One calls the op `experts`, the other
ggml's graph of the same experts, as llama.cpp builds it for Qwen3-MoE: `ggml_mul_mat_id` for up, gate and down, SwiGLU,
the product with the routing weights and the sum over the experts. They take turns: each round measures all numbers of
tokens, first in one process and then in the other. For few tokens, consecutive calls select other experts, so that
weights come from memory. The table has the medians over the rounds, in milliseconds. The overhead of a call counts for
both: PyTorch's dispatcher for us, ctypes for ggml.

ggml has what llama.cpp gives it: float32 activations, weights in the first buffer type of the CPU that supports the
product (it repacks some types), and one pool of threads. Our activations have `--dtype`. The outputs are compared
before the first round: ggml rounds activations to 8 bits, so they differ by about 1 %.

llama-cpp-python has to be installed: `pip install llama-cpp-python` builds it for this processor.
"""

import argparse
import ctypes
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from peer_speed import Process

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
CALLS = 64  # of one token in each round; the first eighth does not count
PAUSE = 0.05  # seconds before a turn, until the threads of the other process sleep
TOLERANCE = 0.05  # of the outputs' relative difference


# ------------------------------------------------------------------------------------------------ the two processes


def random_weights(type: str, model):
    """gate_up and down, the same in both processes."""
    import torch

    from torch_moe_metal.bench.packings import packing_of

    generator, packing = torch.Generator().manual_seed(0), packing_of(type, torch.float32)
    shapes = (model.E, 2 * model.I, model.H), (model.E, model.H, model.I)
    return [packing.weight(*shape, generator=generator)[0] for shape in shapes]


def routes(T: int, E: int, K: int, generator):
    """The experts of T tokens in one call after the other. If E is large enough, consecutive calls share none."""
    import torch

    while True:
        if T * K > E:
            yield torch.rand(T, E, generator=generator).topk(K).indices.int()
        else:
            calls = torch.randperm(E, generator=generator).int().split(T * K)
            yield from (part.view(T, K) for part in calls if len(part) == T * K)


class Ours:
    def __init__(self, type: str, threads: int, dtype: str, name: str):
        import torch

        import torch_moe_metal
        from torch_moe_metal.models import MODELS

        torch.set_num_threads(threads)
        self.type, self.dtype, self.kind = type, getattr(torch, dtype), torch_moe_metal.cpu_isa
        self.experts, self.weights = torch.ops.moe_metal.experts, random_weights(type, MODELS[name])

    def prepare(self, x, routing) -> Callable:
        x = x.to(self.dtype)
        return lambda ids: self.experts(x, routing, ids, *self.weights, format=self.type)

    def last_row(self, output) -> list[float]:
        return output[-1].tolist()


class Parameters(ctypes.Structure):  # ggml_init_params
    _fields_ = [("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Tensor(ctypes.Structure):  # the beginning of ggml_tensor
    _fields_ = [("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("sizes", ctypes.c_int64 * 4)]


RESULTS = {  # that are no pointers
    "backend_dev_supports_op": ctypes.c_bool,
    "backend_graph_compute": ctypes.c_int,
    "gallocr_alloc_graph": ctypes.c_bool,
}


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def silent(level: int, text: bytes, data: int) -> None:
    """A log without the line that repacking prints for each weight."""


class Ggml:
    """ggml's functions, without their prefix. Arguments and results are pointers or fit into one."""

    def __init__(self):
        (package,) = importlib.util.find_spec("llama_cpp").submodule_search_locations
        self.library = ctypes.CDLL(str(next((Path(package) / "lib").glob("libggml.*"))))

    def __getattr__(self, name: str):
        function = getattr(self.library, f"ggml_{name}")
        function.restype = RESULTS.get(name, ctypes.c_void_p)

        def call(*values):
            return function(*(ctypes.c_void_p(value) if isinstance(value, int) else value for value in values))

        setattr(self, name, call)  # for the next time
        return call


class LlamaCpp:
    def __init__(self, type: str, threads: int, dtype: str, name: str):
        self.ggml = ggml = Ggml()  # before PyTorch, whose OpenMP it would use otherwise
        ggml.log_set(silent, None)
        from gguf import GGMLQuantizationType as Types

        from torch_moe_metal.models import MODELS

        model = self.model = MODELS[name]
        self.types = Types
        device = ggml.backend_dev_by_type(0)  # the CPU
        self.backend = ggml.backend_dev_init(device, None)
        pool_parameters = ctypes.create_string_buffer(4096)  # ggml_threadpool_params, which has 528 bytes
        ggml.threadpool_params_init(pool_parameters, threads)
        ggml.backend_cpu_set_threadpool(self.backend, ggml.threadpool_new(pool_parameters))
        ggml.backend_cpu_set_n_threads(self.backend, threads)
        self.plain = ggml.backend_dev_buffer_type(device)
        self.context = ggml.init(Parameters(1 << 24, None, True))
        E, H, I = model.E, model.H, model.I
        sizes, blocks = ((H, I, E), (H, I, E), (I, H, E)), Types[type.upper()]
        self.gate, self.up, self.down = weights = [ggml.new_tensor_3d(self.context, blocks, *size) for size in sizes]
        kinds = [self.buffer_type(device, weight, size[0]) for weight, size in zip(weights, sizes, strict=True)]
        gate_up, down = random_weights(type, model)
        halves = [half.contiguous() for half in gate_up.chunk(2, 1)]
        for weight, data, kind in zip(weights, [*halves, down], kinds, strict=True):
            self.allocate(weight, kind)
            self.set(weight, data)
        names = (ctypes.string_at(ggml.backend_buft_name(kind)).decode() for kind in kinds)
        self.kind = " ".join(dict.fromkeys(names))

    def buffer_type(self, device: int, weight: int, columns: int) -> int:
        """The first one in which the device can multiply this weight. The plain one is last."""
        ggml, K = self.ggml, self.model.K
        name = b"ggml_backend_dev_get_extra_bufts"
        address = ggml.backend_reg_get_proc_address(ggml.backend_dev_backend_reg(device), name)
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
        x = ggml.new_tensor_3d(self.context, self.types.F32, columns, K, 512)
        ids = ggml.new_tensor_2d(self.context, self.types.I32, K, 512)
        product, at = ggml.mul_mat_id(self.context, weight, x, ids), 0
        while extra and extra[at]:
            buffer = ggml.backend_buft_alloc_buffer(extra[at], 0)
            Tensor.from_address(weight).buffer = buffer
            supported = ggml.backend_dev_supports_op(device, product)
            Tensor.from_address(weight).buffer = None
            ggml.backend_buffer_free(buffer)
            if supported:
                return extra[at]
            at += 1
        return self.plain

    def allocate(self, tensor: int, kind: int) -> None:
        ggml = self.ggml
        buffer = ggml.backend_buft_alloc_buffer(kind, ggml.backend_buft_get_alloc_size(kind, tensor))
        ggml.backend_tensor_alloc(buffer, tensor, ggml.backend_buffer_get_base(buffer))

    def set(self, tensor: int, data) -> None:
        self.ggml.backend_tensor_set(tensor, data.data_ptr(), 0, data.nbytes)

    def prepare(self, x, routing) -> Callable:
        """Builds the graph of the experts for len(x) tokens."""
        ggml, context, T, K, H = self.ggml, self.context, len(x), self.model.K, self.model.H
        hidden = ggml.new_tensor_3d(context, self.types.F32, H, 1, T)
        weights = ggml.new_tensor_3d(context, self.types.F32, 1, K, T)
        selected = ggml.new_tensor_2d(context, self.types.I32, K, T)
        for tensor in (hidden, weights, selected):
            self.allocate(tensor, self.plain)
        self.set(hidden, x)
        self.set(weights, routing)
        up = ggml.mul_mat_id(context, self.up, hidden, selected)
        gate = ggml.mul_mat_id(context, self.gate, hidden, selected)
        slots = ggml.mul_mat_id(context, self.down, ggml.swiglu_split(context, gate, up), selected)
        slots = ggml.mul(context, slots, weights)
        output, *views = [ggml.view_2d(context, slots, H, T, 4 * H * K, 4 * H * slot) for slot in range(K)]
        for view in views:
            output = ggml.add(context, output, view)
        graph = ggml.new_graph(context)
        ggml.build_forward_expand(graph, output)
        if not ggml.gallocr_alloc_graph(ggml.gallocr_new(self.plain), graph):
            raise MemoryError("ggml could not allocate the graph")

        def call(ids) -> int:
            self.set(selected, ids)
            if status := ggml.backend_graph_compute(self.backend, graph):
                raise RuntimeError(f"ggml's graph ended with status {status}")
            return output

        return call

    def last_row(self, output: int) -> list[float]:
        rows = Tensor.from_address(output).sizes[1]
        row = (ctypes.c_float * self.model.H)()
        self.ggml.backend_tensor_get(output, row, (rows - 1) * ctypes.sizeof(row), ctypes.sizeof(row))
        return list(row)


ENGINES = {"torch_moe_metal": Ours, "llama.cpp": LlamaCpp}


def milliseconds(call: Callable, ids: list) -> float:
    seconds = []
    for selected in ids:
        start = time.perf_counter()
        call(selected)
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds[len(seconds) // 8 :])


def serve(name: str, type: str, threads: str, dtype: str, model_name: str, *tokens: str) -> None:
    """Prints a line on the standard output for each line on the standard input."""
    engine = ENGINES[name](type, int(threads), dtype, model_name)
    import torch

    from torch_moe_metal.models import MODELS

    model, generator = MODELS[model_name], torch.Generator().manual_seed(1)
    calls, selected, rows = {}, {}, {}
    for T in map(int, tokens):
        x, scores = (torch.randn(T, size, generator=generator) for size in (model.H, model.K))
        calls[T] = engine.prepare(x, scores.softmax(-1))
        selected[T] = routes(T, model.E, model.K, generator)
        rows[T] = engine.last_row(calls[T](next(selected[T])))
    print(json.dumps({"kind": engine.kind, "rows": rows}), flush=True)
    for _ in sys.stdin:
        found = {}
        for T in calls:
            ids = [next(selected[T]) for _ in range(max(1, CALLS // T))]
            time.sleep(PAUSE)
            found[T] = milliseconds(calls[T], ids)
        print(json.dumps(found), flush=True)


# ------------------------------------------------------------------------------------------------ the table


def difference(ours: list[float], theirs: list[float]) -> float:
    """The norm of the difference, relative to the norm of ours."""
    return math.dist(ours, theirs) / math.hypot(*ours)


def compare(options: argparse.Namespace, type: str) -> dict:
    arguments = type, options.threads, options.dtype, options.model, *options.tokens
    processes = [Process(engine, *arguments, script=__file__) for engine in ENGINES]
    ours, theirs = (process.answer() for process in processes)
    rounds = [[process.measure() for process in processes] for _ in range(options.rounds + 1)][1:]
    for process in processes:
        process.end()
    found = {"type": type, "ours": ours["kind"], "theirs": theirs["kind"], "tokens": {}}
    for T in ours["rows"]:
        error = difference(ours["rows"][T], theirs["rows"][T])
        if not error < TOLERANCE:
            raise SystemExit(f"{type}: with {T} tokens the outputs differ by {error:.1%}")
        medians = (statistics.median(each[i][T] for each in rounds) for i in range(len(ENGINES)))
        found["tokens"][T] = dict(zip(("ours", "theirs"), medians, strict=True)) | {"difference": error}
    return found


def row(found: dict) -> str:
    columns = [
        f"{each['ours']:9.2f}{each['theirs']:9.2f}{each['theirs'] / each['ours']:7.2f}{each['difference']:9.2%}"
        for each in found["tokens"].values()
    ]
    return "   ".join([f"{found['type']:7}", *columns, found["theirs"]])


def head(tokens: list[int]) -> str:
    titles = [f"{f'{T} tokens, ms':34}" for T in tokens]
    columns = [f"{'ours':>9}{'theirs':>9}{'ratio':>7}{'differ':>9}" for _ in tokens]
    return "\n".join("   ".join(parts) for parts in ([f"{'':7}", *titles], [f"{'type':7}", *columns, "their weights"]))


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
        return 0
    import torch

    from torch_moe_metal.bench.measure import machine
    from torch_moe_metal.models import MODELS

    plain = [name for name, model in MODELS.items() if not model.experts]  # SwiGLU without bias
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=plain, default="qwen3-30b-a3b", help="default: qwen3-30b-a3b")
    parser.add_argument("--types", nargs="+", default=["q4_0", "q4_k", "q6_k", "q8_0"], metavar="TYPE")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 512], metavar="T", help="default: 1 512")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of ours")
    parser.add_argument("--rounds", type=int, default=15, help="after one that does not count (default: 15)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: PyTorch's")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each type")
    options = parser.parse_args()
    if importlib.util.find_spec("llama_cpp") is None:
        print("llama-cpp-python is not installed: `pip install llama-cpp-python`", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(machine() | {"model": options.model, "dtype": options.dtype, "threads": options.threads}))
    else:
        print(f"{machine()}\nexperts of {options.model}, ours in {options.dtype}, {options.threads} threads")
        print(head(options.tokens))
    for type in options.types:
        found = compare(options, type)
        print(json.dumps(found) if options.json else row(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
