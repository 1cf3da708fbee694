"""Every snippet is accepted or refused as its line says, in every language, and by the check that it names."""

import functools

import pytest

import metal_rules
from metal_sim.engine import address_spaces, snippets

ALL = snippets.read()


@functools.cache
def found(version):
    return snippets.refusals({name: snippet.source for name, snippet in ALL.items()}, version)


def wrong(version):
    """{name: what was found} where that is not what the snippet's line says."""
    result = {}
    for name, snippet in ALL.items():
        by = found(version)[name]
        if snippet.is_refused(version) and snippet.found not in by:
            by = snippets.alone(snippet.source, version)
        right = snippet.found in by if snippet.is_refused(version) else not by
        result |= {} if right else {name: by}
    return result


@pytest.mark.parametrize("version", address_spaces.VERSIONS)
def test_all(version):
    assert wrong(version) == {}


def test_what_apple_refuses_and_these_checks_accept_has_a_reason():
    for name, snippet in ALL.items():
        if snippet.apple.startswith("refuses") and snippet.found == "accepted":
            assert snippet.reason, name


@pytest.mark.parametrize("rule", metal_rules.RULES)
def test_a_rule_is_what_refuses_its_snippets(rule, monkeypatch):
    of_rule = {name: s for name, s in ALL.items() if s.found == rule}
    assert of_rule, f"no snippet breaks {rule}"
    monkeypatch.delitem(metal_rules.RULES, rule)
    for snippet in of_rule.values():
        version = next(v for v in address_spaces.VERSIONS if snippet.is_refused(v))
        assert rule not in snippets.alone(snippet.source, version)


def test_messages_name_the_shader():
    for name, by in found(310).items():
        for check, message in by.items():
            assert "error: " in message, (name, check, message)
            assert not message.startswith("/") or "static assertion" in message or ALL[name].found != "engine", message
