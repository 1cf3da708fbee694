"""Chat with a model in the terminal. Answers are printed while they are generated, and only new tokens of the
conversation are computed. Each line of a pipe is a turn; answers go to stdout, everything else to stderr."""

import contextlib
import signal
import sys
import threading
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .common.cli import UNSAMPLED, CannotRun, Waits, at_least_0, positive
from .common.loading import add_model, check_model, context_of, load_model, load_tokenizer, loading, memory, say
from .common.prefix_options import add_prefix_cache, check_prefix_cache, open_prefix_cache
from .common.progress import Progress

if TYPE_CHECKING:
    from .common.prefix_folder import PrefixFolder
    from .common.prefixes import Prefix

EXAMPLES = """
examples:
  chat openai/gpt-oss-20b                                       the published checkpoint, in MXFP4
  chat Qwen/Qwen3-30B-A3B --bits 4 --system "Answer briefly."   quantised to 4 bits on loading
  chat models/Qwen3-30B-A3B-Q4_K_M.gguf --temperature 0         a GGUF file, greedy decoding
  chat MODEL --prompt "$(cat question.txt)" > answer.txt        one question
"""
HELP = """/reset   starts a new conversation
/exit    exits, like Ctrl-D, and Ctrl-C at the prompt
/help    prints this
Ctrl-C   ends an answer; its text stays in the conversation"""
DIM, PLAIN = "\033[2m", "\033[0m"


def share(text: str) -> float:
    if not 0 < (number := float(text)) <= 1:
        raise ArgumentTypeError(f"must be more than 0 and at most 1, got {text}")
    return number


def add_arguments(parser: ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="answer this and exit")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    said = "0 always takes the most likely token (default of this and --top-p: the checkpoint's)"
    parser.add_argument("--temperature", type=at_least_0, metavar="T", help=said)
    said = "sample from the most likely tokens that together have this probability"
    parser.add_argument("--top-p", type=share, metavar="P", help=said)
    said = "maximum tokens of an answer (default: all that fit into the context)"
    parser.add_argument("--max-tokens", type=positive, metavar="N", help=said)
    parser.add_argument("--seed", type=int, help="seed of the sampling; /reset restarts with it")
    add_prefix_cache(parser)


def run(options: Namespace) -> int:
    try:
        source = check_model(options)
        check_prefix_cache(options)
        with loading(source.name, options.device):
            from ..transformers import patch

            processor = load_tokenizer(source)
            model = load_model(source, options)
            report = patch(model)
        say(report)
        template = getattr(processor, "chat_template", None)
        chat = Chat(model, processor, options, open_prefix_cache(options, source, model, template))
        say(f"{memory(model)}; context: {chat.context:,} tokens")
        try:
            if options.prompt is not None:
                return 0 if chat.turn(options.prompt) else 1
            converse(chat)
        finally:
            chat.prefixes.close()
    except CannotRun as reason:
        print(f"chat: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def converse(chat: "Chat") -> None:
    """Until /exit, the end of the input, or Ctrl-C at the prompt."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  adds line editing and a history to `input`
        say("/help shows the commands")
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            if terminal:
                print()
            return
        if line == "/exit":
            return
        if line == "/reset":
            chat.reset()
        elif line == "/help":
            say(HELP)
        elif line.startswith("/") and line[1:].isalpha():
            say(f"no such command: {line}; /help shows them")
        elif line:
            chat.turn(line)


# ------------------------------------------------------------------------------------------------ the conversation


class Chat:
    """A conversation: its messages, and the cache of the tokens computed so far."""

    def __init__(self, model, processor, options: Namespace, folder: "PrefixFolder | None" = None):
        self.model = model
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.chat_template = self.tokenizer.chat_template or getattr(processor, "chat_template", None)
        self.response_template = response_template(self.tokenizer, model)
        self.system, self.seed, self.most = options.system, options.seed, options.max_tokens
        self.context = context_of(model, options.context)
        self.sampling = sampling(options)
        ends = model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])
        from .common.prefixes import Prefixes

        self.prefixes, self.device = Prefixes(model, folder=folder), threading.Lock()
        if folder is not None:
            folder.turns = self.device
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.prefixes.clear()
        if self.seed is not None:
            torch.manual_seed(self.seed)

    def turn(self, text: str) -> "Answer | None":
        """Print the answer on stdout. Returns None if there is none; then the conversation does not change."""
        start = time.perf_counter()
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            ids = self.encode(self.messages)
            if len(ids) >= self.context:
                raise CannotRun(
                    f"the conversation has {len(ids):,} tokens, the context {self.context:,}: /reset starts a new one"
                )
            answer = self.answer(ids, start)
        except CannotRun as reason:
            say(reason)
            answer = None
        except KeyboardInterrupt:
            say(f"{PLAIN if sys.stdout.isatty() else ''}\n[interrupted]")
            answer = None
        self.messages = before if answer is None else [*self.messages, answer.message]
        return answer

    def encode(self, messages: list[dict], answers: bool = True) -> list[int]:
        """The tokens of these messages, followed by the beginning of an answer if the model `answers` them."""
        if not self.chat_template:
            return self.tokenizer("\n".join(message["content"] for message in messages))["input_ids"]
        how = {"chat_template": self.chat_template, "add_generation_prompt": answers, "return_dict": True}
        try:
            return self.tokenizer.apply_chat_template(messages, **how)["input_ids"]
        except Exception as error:  # a template may raise anything
            raise CannotRun(f"the model's chat template does not take this: {error}") from error

    def answer(self, ids: list[int], start: float) -> "Answer":
        prefix = self.prefixes.take(ids)
        new, room = len(ids) - len(prefix.ids), self.context - len(ids)
        answer = Answer(self.tokenizer, self.ends, self.parser(ids), start, len(ids), new)
        with until_interrupted() as stop, self.device:
            model = self.in_pieces(ids, prefix, answer, stop)
            options = {"max_new_tokens": min(self.most or room, room), "streamer": answer, "stopping_criteria": [stop]}
            try:
                for beginning in self.prefixes.before(prefix, ids, self.cuts(ids)):
                    self.generate(model, beginning, prefix, max_new_tokens=1, **UNSAMPLED)
                    prefix.note(beginning)
                output = self.generate(model, ids, prefix, **options, **self.sampling)
            except Stopped:  # between two forwards, so the cache is whole
                self.prefixes.give(prefix, ids)
                raise KeyboardInterrupt from None
            finally:
                answer.bar.clear()
        self.prefixes.give(prefix, output)
        self.prefixes.settle()
        why = self.ending(output[-1], len(output) - len(ids), room, stop.wanted)
        say(f"[{answer}{why}]")
        return answer

    def in_pieces(self, ids: list[int], prefix: "Prefix", answer: "Answer", stop: "Stop"):
        """The model, which shows how much of a long prompt is computed, and stops between its pieces."""
        from .common.prefixes import PIECE
        from .serve.turns import with_turns

        def before_forward() -> None:
            if answer.times:
                return
            if stop.wanted:
                raise Stopped
            self.prefixes.note_step(prefix, ids)
            if prefix.cache is not None and answer.computed > PIECE:
                answer.bar.show(prefix.cache.get_seq_length(), "tokens of the prompt")

        return with_turns(self.model, before_forward)

    def cuts(self, ids: list[int]) -> list[int]:
        from .common.prefixes import cuts

        return cuts(self.messages, ids, self.encode) if self.prefixes.needs_cuts else []

    def generate(self, model, ids: list[int], prefix: "Prefix", **options) -> list[int]:
        """These tokens and those that follow."""
        from ..transformers.versions import with_cache
        from .common.prefixes import PIECE

        prompt = torch.tensor([ids], device=self.model.device)
        return model.generate(
            prompt,
            prefill_chunk_size=PIECE if self.prefixes.continues and len(ids) > PIECE else None,
            attention_mask=torch.ones_like(prompt),
            pad_token_id=self.tokenizer.pad_token_id or 0,
            logits_processor=[Waits()],
            **with_cache(prefix.cache),
            **options,
        )[0].tolist()

    def ending(self, last: int, tokens: int, room: int, interrupted: bool) -> str:
        """The reason if the answer ended before the model ended it."""
        if last in self.ends:
            return ""
        if interrupted:
            return "; interrupted"
        if tokens >= room:
            return f"; cut off by the context of {self.context:,} tokens"
        return "; cut off by --max-tokens" if tokens == self.most else ""

    def parser(self, ids: list[int]):
        """A parser that separates reasoning from the answer, if the model's format is known."""
        if self.response_template is None or not self.chat_template:
            return None
        from transformers.utils.chat_parsing import ResponseParser

        return ResponseParser(self.response_template, prefix=self.tokenizer.decode(ids))


def sampling(options: Namespace) -> dict[str, object]:
    """The sampling arguments of `generate`. Missing ones are those of the checkpoint."""
    if options.temperature == 0:
        return UNSAMPLED
    given = {"temperature": options.temperature, "top_p": options.top_p}
    given = {name: value for name, value in given.items() if value is not None}
    return {"do_sample": True} | given if given else {}


def response_template(tokenizer, model) -> dict | None:
    """The format of the model's answers, from its tokenizer or from transformers' server, which needs fastapi."""
    from .serve.harmony import HARMONY

    template = getattr(tokenizer, "response_template", None)
    if template is not None:
        return template
    if model.config.model_type == "gpt_oss":
        return HARMONY
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:
        return None
    return get_response_template(tokenizer, model)


class Stopped(Exception):
    """Ctrl-C before the first token."""


@dataclass
class Stop:
    """A stopping criterion of `generate`."""

    wanted: bool = False

    def __call__(self, ids: torch.Tensor, _scores: object, **_more) -> torch.Tensor:
        return torch.full((ids.shape[0],), self.wanted, device=ids.device)


@contextlib.contextmanager
def until_interrupted() -> Iterator[Stop]:
    """The first Ctrl-C ends the answer after a complete token, or after a piece of the prompt, so that the cache stays
    valid. A second one before that raises."""
    stop = Stop()

    def interrupt(number: int, frame: object) -> None:
        if stop.wanted:
            raise KeyboardInterrupt
        stop.wanted = True

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------------------------------------ an answer


class Answer:
    """An answer, printed while it is generated, and its speed. It is the streamer of `generate`."""

    def __init__(self, tokenizer, ends: set[int], parser, start: float, prompt: int, computed: int):
        self.tokenizer, self.ends, self.parser, self.start = tokenizer, ends, parser, start
        self.prompt, self.computed = prompt, computed  # tokens of the prompt, and those of them that had to be computed
        self.bar = Progress(prompt, wanted=True)
        self.times: list[float] | None = None  # time of each token; None until the prompt has been received
        self.ids: list[int] = []
        self.decoded = 0, 0  # start and end of the last piece of text
        self.texts: dict[str, str] = {}  # the printed text, by the parser's name of its part
        self.shown = "content"
        if parser is not None:
            self.show_events(parser.initial_events)

    def put(self, ids: torch.Tensor) -> None:
        if self.times is None:
            self.times = []
            return
        if not self.times:
            self.bar.clear()
        self.times.append(time.perf_counter())
        self.ids += (i for i in ids.tolist() if i not in self.ends)
        self.show_text(whole=True)

    def show_text(self, whole: bool) -> None:
        """Print the text that the last tokens add. Unless `whole`, an incomplete character is held back. The text of a
        token can depend on earlier ones."""
        start, end = self.decoded
        before, text = self.decode(self.ids[start:end]), self.decode(self.ids[start:])
        if len(text) <= len(before) or (whole and text.endswith("\ufffd")):
            return
        self.decoded = end, len(self.ids)
        self.show(text[len(before) :])

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.parser is None)

    def show(self, text: str) -> None:
        if self.parser is None:
            return self.show_part("content", text)
        with contextlib.suppress(ValueError):  # the arguments of a tool call may be invalid JSON
            self.show_events(self.parser.feed(text))

    def show_events(self, events: list[dict]) -> None:
        for event in events:
            if event["type"] == "region_chunk":
                self.show_part(event["field"], event["text"])

    def show_part(self, name: str, text: str) -> None:
        """Reasoning is dim, and is not printed if stdout is not a terminal."""
        self.texts[name] = self.texts.get(name, "") + text
        if name != self.shown:
            self.change_to(name)
        apart = name != "content" and not sys.stdout.isatty()
        print(text, end="", flush=True, file=sys.stderr if apart else sys.stdout)

    def change_to(self, name: str) -> None:
        terminal = sys.stdout.isatty()
        if name != "content":
            print(DIM if terminal else "", end="")
        else:
            print(PLAIN if terminal else "", file=sys.stdout if terminal else sys.stderr)
        self.shown = name

    def end(self) -> None:
        """`generate` calls this after the last token."""
        self.show_text(whole=False)
        if self.parser is not None:
            with contextlib.suppress(ValueError):
                self.show_events(self.parser.finalize()[1])
            if not self.texts:  # the answer is not in the model's format
                self.show_part("content", self.tokenizer.decode(self.ids, skip_special_tokens=True))
        if self.shown != "content":
            self.change_to("content")
        print(flush=True)

    @property
    def message(self) -> dict:
        """The answer as a message for the chat template."""
        texts = {name: text.strip() if self.parser else text for name, text in self.texts.items()}
        return {"role": "assistant", "content": texts.pop("content", "")} | texts

    def __str__(self) -> str:
        tokens, spent = len(self.times), self.times[-1] - self.times[0]
        speed = f", {(tokens - 1) / spent:.1f} tokens/s" if spent else ""
        first = f"the first after {self.times[0] - self.start:.2f} s"
        return f"{tokens} tokens{speed}, {first}; {self.computed} of the prompt's {self.prompt} tokens were new"
