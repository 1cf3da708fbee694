"""Every snippet is accepted or refused as its line says, in every language, and by the check that it names."""

import functools
import re

import pytest

from metal_sim import engine
from metal_sim.engine import snippets
from metal_sim.engine.snippets import address_spaces, metal_rules

ALL = snippets.read()


@functools.cache
def found(version):
    return snippets.refusals({name: snippet.source for name, snippet in ALL.items()}, version)


def wrong(version):
    """{name: what was found} of the snippets whose line says otherwise."""
    result = {}
    for name, snippet in ALL.items():
        by = found(version)[name]
        right = snippet.found in by if snippet.is_refused(version) else not by
        result |= {} if right else {name: by}
    return result


@pytest.mark.parametrize("version", address_spaces.VERSIONS)
def test_all(version):
    assert wrong(version) == {}


def test_snippets_that_only_apple_refuses_have_a_reason():
    for name, snippet in ALL.items():
        if snippet.apple.startswith("refuses") and snippet.found == "accepted":
            assert snippet.reason, name


@pytest.mark.parametrize("rule", metal_rules.RULES)
def test_each_rule_refuses_its_snippets(rule, monkeypatch):
    of_rule = {name: s for name, s in ALL.items() if s.found == rule}
    assert of_rule, f"no snippet breaks {rule}"
    monkeypatch.delitem(metal_rules.RULES, rule)
    for snippet in of_rule.values():
        refused, version = {}, next(v for v in address_spaces.VERSIONS if snippet.is_refused(v))
        snippets.translations(snippet.source, version, refused)
        assert rule not in refused


@pytest.mark.parametrize("message", address_spaces.NEWER_LANGUAGE)
def test_each_warning_refuses_its_snippets(message, monkeypatch):
    names = [name for name, by in found(310).items() if re.search(message, by.get("newer_language", ""))]
    assert names, f"no snippet is refused for {message}"
    monkeypatch.delitem(address_spaces.NEWER_LANGUAGE, message)
    for name in names:
        assert "newer_language" not in snippets.alone(ALL[name].source, 310)


@pytest.mark.parametrize(
    "flag, name",
    [("-Werror=global-constructors", "as_constant_runtime_init"), ("-Werror=c++11-narrowing", "lang_narrowing_return")],
)
def test_each_flag_refuses_its_snippet(flag, name, monkeypatch):
    assert "address_spaces" in found(310)[name]
    monkeypatch.setattr(address_spaces, "FLAGS", [f for f in address_spaces.FLAGS if f != flag])
    assert "address_spaces" not in snippets.alone(ALL[name].source, 310)


def test_methods_refuse_objects_in_other_address_spaces(monkeypatch):
    names = [name for name, snippet in ALL.items() if snippet.apple == "refuses <4.1"]
    monkeypatch.setattr(address_spaces, "methods", lambda tokens, version: tokens)
    without = snippets.refusals({name: ALL[name].source for name in names}, 310)
    assert len(names) >= 5 and all("address_spaces" not in by for by in without.values())


def test_assertions_of_the_shim_refuse_their_snippets():
    by_message = {}
    for name, by in found(310).items():
        if match := re.search("static assertion failed(?: due to requirement '.*?')?: (.*)", by.get("engine", "")):
            by_message.setdefault(match[1], set()).add(name)
    texts = {name: snippets.translations(ALL[name].source, 310, {}) for of_it in by_message.values() for name in of_it}
    still = {name for name, _, _ in snippets.check_engine(texts, 310, ["-Dstatic_assert(...)="])}
    accepted = [message for message, of_it in by_message.items() if of_it - still]
    assert len(accepted) >= 20, accepted  # without the other assertions, compilation fails with a worse message


def test_a_function_without_a_body_is_refused_by_the_linker():
    source = snippets.HEAD + "float twice(float v);\n" + snippets.KERNEL + " { x[i] = twice(x[i]); }\n"
    with pytest.raises(engine.CompileError, match=r"undefined (symbol|reference)"):
        engine.Library(source)


def test_messages_are_errors_of_the_shader():
    for name, by in found(310).items():
        for check, message in by.items():
            assert re.search(f"^(program_source|of_{name}):\\d+|^/.*static assertion failed|^/", message), (
                check,
                message,
            )
