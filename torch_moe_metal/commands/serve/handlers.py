"""The endpoints of OpenAI's API. transformers' handlers answer them, after a check of every field."""

from transformers import BatchEncoding, GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import Modality

from ..common.prefixes import cuts
from . import fields, prompts
from .answers import as_openai_stream, with_logprobs
from .checked import Checked, flat, ids_of
from .constraints import Constraint, content, lark
from .infilling import Infilling
from .logprobs import Scored, as_text
from .requests import current
from .values import expect

TEXT_ONLY = {"type": "text"}


class OfChats(Checked):
    """The two endpoints whose prompt is made by the model's chat template."""

    chat = True

    def inputs(self, body: dict) -> BatchEncoding:
        processor, tools = self.model_manager.processor, self.tools(body)
        messages = self.inputs_of(self.messages(body))
        effort = body.get("reasoning_effort", body.get("reasoning", {}).get("effort"))
        values = prompts.variables(processor, tools, body.get("chat_template_kwargs", {}), effort)
        video = False
        if self.modality != Modality.LLM:
            video = any(part.get("type") == "video" for message in messages for part in message["content"])
            values["load_audio_from_video"] = video and self.modality == Modality.MULTIMODAL
            values |= {"num_frames": 32} if video else {}  # as transformers' own handler

        def encode(messages: list[dict], answers: bool, as_tensors: str | None) -> BatchEncoding:
            return processor.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=answers,
                tokenize=True,
                return_dict=True,
                return_tensors=as_tensors,
                **values,
            )

        inputs = encode(messages, True, None if self.batched else "pt")
        if not self.batched and self.manager.needs_cuts(inputs):
            ids = flat(ids_of(inputs))
            current.get().cuts = cuts(messages, ids, lambda *given: flat(encode(*given, None)["input_ids"]))
        return inputs

    def inputs_of(self, messages: list[dict]) -> list[dict]:
        """transformers' own, with the reasoning, and the text before a call of a tool."""
        made = self.get_processor_inputs_from_messages(messages, self.modality)
        bare = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
        for message, given, plain in zip(
            made, messages, self.get_processor_inputs_from_messages(bare, self.modality), strict=True
        ):
            message["content"] = plain["content"]
            if isinstance(given.get("reasoning_content"), str):
                self.add_reasoning(message, given["reasoning_content"])
        return made

    def add_reasoning(self, message: dict, reasoning: str) -> None:
        """gpt-oss's template has another name for it, and refuses it next to the text before a call."""
        if not self.model_manager.form.before:
            message["reasoning_content"] = reasoning
        elif message.get("tool_calls"):
            message |= {"thinking": reasoning, "content": ""}

    def tools(self, body: dict) -> list[dict] | None:
        return None if body.get("tool_choice") == "none" else body.get("tools") or None

    def arguments(self, body: dict) -> dict:
        return {"tools": self.tools(body)}

    def constraint(self, body: dict, input_ids: list[int]) -> Constraint | None:
        tools, several = self.tools(body) or [], body.get("parallel_tool_calls") is not False
        if (forced := forced_tools(body.get("tool_choice"), tools)) is not None:
            return self.constraints.make("tool_choice", input_ids, tools=forced, several=several)
        name, form = self.format(body)
        grammar = content(form) if "grammar" not in body else lark(body["grammar"])
        if grammar is None:
            return None
        name = "grammar" if "grammar" in body else name
        return self.constraints.make(name, input_ids, grammar, tools, several)

    def format(self, body: dict) -> tuple[str, dict]:
        """The field with the form of the answer, and the form."""
        return "response_format", body.get("response_format", TEXT_ONLY)


def forced_tools(choice: object, tools: list[dict]) -> list[dict] | None:
    """The tools of which a request forces one to be called."""
    if choice in (None, "auto", "none"):
        return None
    expect(bool(tools), "tool_choice", "'auto' or 'none' without tools", choice)
    if choice == "required":
        return tools
    name = (choice.get("function") or choice).get("name")
    found = [tool for tool in tools if tool["function"]["name"] == name]
    expect(bool(found), "tool_choice", "the name of one of the tools", name)
    return found


def cleaned(message: dict) -> dict:
    """The message without empty fields, for which transformers drops the content."""
    found = {
        name: value for name, value in message.items() if value is not None and (name, value) != ("tool_calls", [])
    }
    return found | {"role": "system"} if found.get("role") == "developer" else found  # only new templates know it


class Chat(OfChats, ChatCompletionHandler):
    fields, required, prefix = fields.CHAT, "messages", "chatcmpl-"

    async def handle_request(self, body: dict, request_id: str):
        return as_openai_stream(await super().handle_request(body, request_id))

    def messages(self, body: dict) -> list[dict]:
        return [cleaned(message) for message in body["messages"]]

    def check(self, body: dict) -> None:
        super().check(body)
        right = body.get("logprobs") or not body.get("top_logprobs")
        expect(right, "top_logprobs", "a value only with logprobs", body.get("top_logprobs"))

    def likeliest(self, body: dict) -> int | None:
        return body.get("top_logprobs", 0) if body.get("logprobs") else None

    def completed(self, answer: dict) -> dict:
        if current.get().recorder is not None:
            answer["choices"][0]["logprobs"] = {"content": current.get().entries, "refusal": None}
        return answer

    def _build_chunk_sse(self, request_id: str = "", content: str | None = None, **options) -> str:
        event = super()._build_chunk_sse(request_id, content, **options)
        scored = isinstance(content, Scored)
        return with_logprobs(event, {"content": content.entries, "refusal": None}) if scored else event


class Completions(Checked, CompletionHandler):
    fields, required, prefix = fields.COMPLETIONS, "prompt", "cmpl-"

    def __init__(self, models, generation, strict: bool = False):
        super().__init__(models, generation, strict)
        self.tokenizer = getattr(models.processor, "tokenizer", models.processor)
        self.infilling = Infilling(self.tokenizer)

    async def handle_request(self, body: dict, request_id: str):
        return as_openai_stream(await super().handle_request(body, request_id))

    def begin(self, body: dict):
        prompt = body.get("prompt")
        one = isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str)
        return super().begin(body | {"prompt": prompt[0]} if one else body)

    def inputs(self, body: dict) -> BatchEncoding:
        prompt, after = body["prompt"], body.get("suffix")
        if after:
            known = self.infilling.tokens is not None
            expect(known, "suffix", "no value, as the model has no tokens for text between two others", after)
            prompt = self.infilling.prompt(prompt, after)
        return self.tokenizer(prompt, return_tensors=None if self.batched else "pt")

    def ends(self, body: dict, own: int | list[int] | None) -> list[int]:
        return super().ends(body, own) + (list(self.infilling.ends.values()) if body.get("suffix") else [])

    def prepare(self, body: dict, index: int, inputs: BatchEncoding) -> GenerationConfig:
        config = super().prepare(body, index, inputs)
        if body.get("suffix"):  # some tokenizers have them as text
            current.get().stops = [*current.get().stops, *self.infilling.ends]
        return config

    def arguments(self, body: dict) -> dict:
        return {}

    def likeliest(self, body: dict) -> int | None:
        return None if body.get("logprobs") is False else body.get("logprobs")

    def completed(self, answer: dict) -> dict:
        if current.get().recorder is not None:
            answer["choices"][0]["logprobs"] = as_text(current.get().entries)
        return answer

    def _build_chunk_sse(self, request_id: str, model_id: str, text: str = "", **options) -> str:
        event = super()._build_chunk_sse(request_id, model_id, text, **options)
        return with_logprobs(event, as_text(text.entries, text.start)) if isinstance(text, Scored) else event


class Responses(OfChats, ResponseHandler):
    fields, required, prefix = fields.RESPONSES, "input", ""

    def format(self, body: dict) -> tuple[str, dict]:
        return "text", body.get("text", {}).get("format") or TEXT_ONLY

    def messages(self, body: dict) -> list[dict]:
        items = body["input"]
        return self._normalize_input(
            body | {"input": [cleaned(item) for item in items] if type(items) is list else items}
        )

    def tools(self, body: dict) -> list[dict] | None:
        return self._normalize_tools(super().tools(body))

    def arguments(self, body: dict) -> dict:
        return {"body": body, "tools": self.tools(body)}
