"""The format of gpt-oss's answers. transformers reads it from the tokenizer, but GGUF files and mlx-lm folders lack
it."""

HARMONY = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {
            "open_pattern": r"<\|channel\|>(?:analysis|commentary)<\|message\|>",
            "close_pattern": r"<\|end\|>(?:<\|start\|>assistant)?",
            "repeats": True,
            "join": "\n",
        },
        "tool_calls": {
            "open_pattern": r"(?:<\|channel\|>\w+)?\s*to=functions\.(?P<name>[\w.-]+)[^{]*?<\|message\|>",
            "close_pattern": r"<\|call\|>|<\|end\|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {
            "open_pattern": r"<\|channel\|>final(?:[^{<]*|\s*<\|constrain\|>\w+)<\|message\|>",
            "close_pattern": r"<\|return\|>|<\|end\|>",
        },
    },
}
