"""Answers that a grammar allows: `response_format`, `grammar`, and calls of tools that a request forces.

llguidance computes which tokens may come next. A grammar begins with the model's reasoning, if it has any, and with
what its template has before the text.
"""

import functools
import json
import re
import threading
from collections.abc import Sequence

import torch
from transformers.cli.serving.utils import build_response_parser
from transformers.utils.chat_template_utils import _REASONING_FIELDS

from .calls import ANYTHING, LITTLE_SPACE, Rules, quoted
from .requests import Refused
from .values import expect

MISSING = "this needs llguidance: pip install llguidance"
MAX_GRAMMAR = 256 << 10  # characters


class Constraint:
    """Leaves only the tokens that may come next."""

    def __init__(self, matcher):
        self.matcher, self.consumed = matcher, 0
        self.problem: str | None = None

    def change(self, scores: torch.Tensor, tokens: Sequence[int] | torch.Tensor, start: int) -> None:
        for token in list(map(int, tokens[start + self.consumed :])):
            self.matcher.consume_token(token)
            self.consumed += 1
        allowed = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8)[: len(scores)]
        if self.matcher.is_error():  # a limit of llguidance; only the tokens that end the answer are allowed then
            self.problem = self.problem or self.matcher.get_error().splitlines()[0][:200]
        scores[: len(allowed)].masked_fill_((allowed == 0).to(scores.device), -torch.inf)
        scores[len(allowed) :] = -torch.inf


class Constraints:
    """Makes the constraints of requests to one model."""

    def __init__(self, models):
        self.models, self.lock = models, threading.Lock()
        self.tokenizer = getattr(models.processor, "tokenizer", models.processor)

    @functools.cached_property
    def known(self):
        """llguidance's form of the tokenizer, which takes a second for a large vocabulary."""
        from llguidance import hf

        ends = self.models.model.generation_config.eos_token_id
        return hf.from_tokenizer(self.tokenizer, eos_token=self.tokenizer.eos_token_id if ends is None else ends)

    def make(
        self, name: str, input_ids, grammar: dict | None = None, tools: Sequence[dict] = (), several: bool = True
    ) -> Constraint:
        """The answer has this grammar, or is a call of one of these tools, or several calls. `name` is the field that
        asks for it. Without `input_ids` the answer is no message: nothing precedes it."""
        self.load(name)
        rules = Rules(self.mark, self.is_token)
        found = [] if grammar is None else [f"{self.mark(self.models.form.before if input_ids else '')} @content"]
        if tools and self.models.form.call is not None:
            found.append(self.calls(rules, tools, several))
        elif not found:
            message = "tool_choice: expected 'auto' or 'none', as the form of this model's calls is not known"
            raise Refused(400, message, param=name)
        before = self.reasoning(input_ids) if input_ids else ""
        lark = "\n".join([f"start: {before} answer", f"answer: {' | '.join(found)}", *rules.lines])
        grammars = [{"lark_grammar": lark}, *rules.grammars, *([grammar | {"name": "content"}] if grammar else [])]
        return self.compiled(name, json.dumps({"grammars": grammars}))

    def calls(self, rules: Rules, tools: Sequence[dict], several: bool) -> str:
        form = self.models.form.call
        choice = " | ".join(f"({rules.call(form, tool['function'])})" for tool in tools)
        rules.lines.append(f"call: {choice}")
        more = f"({self.mark(form.between)} call)*" if several and form.between is not None else ""
        return f"{self.mark(form.first)} call {more} {self.mark(form.last)}"

    def load(self, name: str) -> None:
        try:
            with self.lock:
                _ = self.known
        except ImportError as error:
            raise Refused(400, f"{name}: {MISSING}", param=name) from error
        except ValueError as error:
            raise Refused(
                400, f"{name}: llguidance does not know the model's tokenizer: {error}", param=name
            ) from error

    def compiled(self, name: str, grammar: str) -> Constraint:
        from llguidance import LLMatcher

        expect(len(grammar) <= MAX_GRAMMAR, name, f"a grammar of at most {MAX_GRAMMAR:,} characters", len(grammar))
        matcher = LLMatcher(self.known, grammar, log_level=0)
        if matcher.is_error():
            problem = matcher.get_error().splitlines()[0][:200]
            raise Refused(400, f"{name}: expected a grammar or schema that llguidance knows: {problem}", param=name)
        return Constraint(matcher)

    def reasoning(self, input_ids) -> str:
        """What the model may write before: the rest of its reasoning, all of it, or nothing."""
        if (marks := self.models.form.think) is None or not self.is_token(marks[0]):
            return ""
        parser = build_response_parser(self.models.processor, self.models.model, input_ids)
        events = [each["type"] for each in parser.initial_events if each.get("field") in _REASONING_FIELDS]
        rest = f"{ANYTHING} {self.mark(marks[1])} /\\s{{0,4}}/"
        if "region_close" in events:
            return ""
        return rest if events else f"({self.mark(marks[0])} {rest})?"

    @functools.cached_property
    def specials(self) -> dict[str, int]:
        """The tokens that no text has."""
        added = self.tokenizer.added_tokens_decoder
        return {str(token): i for i, token in added.items() if self.known.is_special_token(i)}

    def is_token(self, mark: str) -> bool:
        """Whether the mark begins with such a token."""
        return mark.startswith(tuple(self.specials))

    def mark(self, text: str) -> str:
        """A text of the template, in which the ends of lines may be left out."""
        specials = sorted(self.specials, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, specials))})", text) if specials else [text]
        return " ".join(f"<[{self.specials[each]}]>" if each in self.specials else literal(each) for each in pieces)


def literal(text: str) -> str:
    return ' "\\n"? '.join(quoted(each) if each else "" for each in text.split("\n"))


def content(form: dict) -> dict | None:
    """The grammar that a `response_format` asks for, or the `format` of /v1/responses."""
    if form["type"] == "json_object":
        return {"json_schema": LITTLE_SPACE | {"type": "object"}}
    if form["type"] == "json_schema":
        return {"json_schema": LITTLE_SPACE | form.get("json_schema", form)["schema"]}
    return None


def lark(text: str) -> dict:
    """A grammar in Lark's syntax, or in llama.cpp's GBNF."""
    try:
        from llguidance.gbnf_to_lark import any_to_lark

        return {"lark_grammar": any_to_lark(text)}
    except ImportError as error:
        raise Refused(400, f"grammar: {MISSING}", param="grammar") from error
    except Exception as error:  # of the converter, which raises several
        raise Refused(400, f"grammar: expected Lark or GBNF: {str(error)[:200]}", param="grammar") from error
