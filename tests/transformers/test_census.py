"""The census of transformers' model types: some of the types, and faults that it must find.

Needs torch and transformers, as tests/transformers/test_generation.py does.
"""

from __future__ import annotations

import pytest

from tests.support import transformers_models as support

pytestmark = support.MARKS
libraries = support.libraries  # the fixture


@pytest.mark.parametrize(
    "model_type",
    [
        *("albert", "bart", "clip", "deberta", "distilbert", "gemma3", "llama4_text", "llava"),
        *("modernbert", "mpnet", "t5", "vit", "whisper"),
    ],
)
def test_types_of_the_census(model_type, libraries):
    from tests.tools import transformers_census as census

    verdict = census.judge(model_type)
    assert verdict.status in (census.RIGHT, census.NOT_BUILT)
    if verdict.status == census.NOT_BUILT:
        assert "does not call transformers' attention interface" in verdict.reason
    assert (verdict.status == census.RIGHT) == (model_type not in ("deberta", "mpnet"))
    if model_type in ("bart", "t5", "whisper"):
        assert verdict.of.endswith("ForConditionalGeneration")
        assert "a cache" in verdict.also
        assert ("padding" in verdict.also) == (model_type != "whisper")


def test_the_census_finds_faults_and_refusals(libraries, monkeypatch):
    from tests.tools import transformers_census as census

    _, _, bridge = libraries
    assert census.judge("deepseek_v32").status == census.REFUSED
    original = bridge.attend

    def attend(query, key, *args, **options):
        return original(query, key * 1.01, *args, **options)

    monkeypatch.setattr(bridge, "attend", attend)
    assert census.judge("llama").status == census.WRONG

    def crashes(after):
        calls = []

        def attend(*args, **options):
            calls.append(1)
            if len(calls) > after:
                raise TypeError("on purpose")
            return original(*args, **options)

        return attend

    for after, reason in ((0, "TypeError: on purpose"), (4, "with padding: TypeError: on purpose")):
        monkeypatch.setattr(bridge, "attend", crashes(after))
        verdict = census.judge("llama")
        assert verdict.status == census.CRASHED
        assert verdict.reason.startswith(reason)
