"""Structured output: whatever the model would say, its text follows the grammar."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("llguidance", reason="structured output needs the serve extra")
pytest.importorskip("jinja2", reason="the server's tests need the serve extra")
pytest.importorskip("uvicorn", reason="the server's tests need the serve extra")

from benchmarks.serving.client import write_words
from examples.engine.drafts.speculation import Speculation
from examples.engine.engine import Engine
from examples.engine.http.chat import ChatTemplate
from examples.engine.request import Request, Sampling
from examples.engine.structure import Grammars, load_grammars
from examples.text import Bytes, Subwords
from tests.support import serving as support
from tests.support.engines import build
from tests.support.serving import openai_client, serving, wait_until_idle

openai = support.openai  # the fixture
SCARCE = {"sliding": 7, "global": 17, "state": 5}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ab", "abc", "x"]},
        "number": {"type": "integer", "minimum": -5, "maximum": 99},
        "several": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "number", "several"],
    "additionalProperties": False,
}
PATTERN = r"(ab|c){2,4}[0-9]é"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Bytes(), 256)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build(speculation=Speculation(3, shortest=1, backs_off=False))


def test_a_tokenizer_file_without_an_end_can_be_constrained(tmp_path):
    write_words(tmp_path, 256)
    grammar = Grammars(Bytes(), 256, path=tmp_path / "tokenizer.json").from_regex("a{2}")
    matcher = grammar.matcher()
    assert not matcher.accept(ord("a"))
    assert matcher.accept(ord("a"))


@pytest.mark.parametrize("pattern", ["", "[^\\x00-\\x{10FFFF}]"])
def test_a_grammar_that_matches_nothing_is_refused(grammars, pattern):
    with pytest.raises(ValueError, match=r"^the grammar allows no token$"):
        grammars.from_regex(pattern)


def test_a_grammar_that_only_refers_to_itself_is_refused(grammars):
    with pytest.raises(ValueError, match=r"^the grammar allows no token$"):
        grammars.from_schema({"$ref": "#"})


@pytest.mark.extended
def test_a_grammar_that_is_too_complex_is_refused(grammars):
    """It would delay a step by seconds, and then end the text anywhere."""
    with pytest.raises(ValueError, match=r"^the grammar failed: lexer error: too many expressions"):
        grammars.from_regex("((a{100}){100}){100}")


def test_a_matcher_that_fails_does_not_end_the_text(grammars):
    matcher = grammars.from_regex("ab").matcher()
    with pytest.raises(RuntimeError, match=r"^the grammar failed: [^\n]*$"):
        matcher.accept(ord("b"))


def check_json(text: str) -> dict:
    found = json.loads(text)
    assert list(found) == ["name", "number", "several"]
    assert found["name"] in ("ab", "abc", "x")
    assert -5 <= found["number"] <= 99
    assert 1 <= len(found["several"]) <= 2
    assert {type(one) for one in found["several"]} == {bool}
    assert " " not in text
    return found


@pytest.mark.extended
def test_texts_follow_their_grammars_in_mixed_batches(engine, grammars):
    schema, pattern = grammars.from_schema(SCHEMA), grammars.from_regex(PATTERN)
    requests = []
    for seed in range(6):
        sampling = Sampling(1.5, seed=seed, presence_penalty=seed % 2)
        for grammar in (schema, pattern, None):
            requests.append(Request((1, 2, seed), 54, sampling, grammar=grammar))
    engine.reset(num_blocks=SCARCE)
    sequences = engine.generate(requests)
    assert engine.scheduler.num_preemptions > 0
    texts = []
    for sequence in sequences:
        if sequence.request.grammar is schema:
            texts.append(json.dumps(check_json(sequence.text)))
        elif sequence.request.grammar is pattern:
            texts.append(sequence.text)
            assert re.fullmatch(PATTERN, sequence.text)
        assert sequence.finish_reason == ("stop" if sequence.request.grammar else "length")
    assert len(set(texts)) > 6
    engine.reset()
    for sequence in sequences[:6]:
        (alone,) = engine.generate([sequence.request])
        assert alone.chosen == sequence.chosen


def test_a_stop_token_ends_a_text_where_the_grammar_allows_it(engine):
    engine.reset()
    a, end = ord("a"), 10
    grammar = Grammars(Bytes(), 256, [end]).from_regex("a{3}(a{3})?")
    biased = Sampling(logit_bias=((end, 100.0),))
    for sampling, text in ((biased, "aaa"), (Sampling(logit_bias=((a, 100.0),)), "aaaaaa")):
        (one,) = engine.generate([Request((1,), 20, sampling, (end,), grammar=grammar)])
        assert (one.text, one.finish_reason) == (text, "stop")


class _Followers:
    """Stands in for other processes, and records what they are told."""

    def __init__(self):
        self.told = []

    def tell(self, function, *_) -> None:
        self.told.append(function.__name__)


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "with-followers"])
@pytest.mark.parametrize("where", ["allowed", "accept"])
def test_a_grammar_that_fails_fails_its_request_alone(engine, grammars, monkeypatch, where, shared):
    """It fails during its text, before or after a step, while others go on."""
    engine.reset()
    prompt = tuple(range(40, 60))
    (expected,) = engine.generate([Request(prompt, 9)])
    followers = _Followers() if shared else None
    monkeypatch.setattr(engine, "followers", followers)
    bad = engine.add(Request((1,), 5, grammar=grammars.from_regex("a+")))
    good = engine.add(Request(prompt, 9))
    while not (bad.chosen and good.chosen):
        engine.step()
    chosen = len(good.chosen)
    computed = engine.statistics.num_computed_tokens
    told = followers and len(followers.told)

    def fail(*_):
        raise RuntimeError("too much")

    monkeypatch.setattr(bad.matcher, where, fail)
    with pytest.raises(RuntimeError, match="too much") as caught:
        engine.step()
    assert where == "accept" or not shared or len(followers.told) == told
    outputs = engine.recover(caught.value)
    assert (outputs[-1].sequence, outputs[-1].finish_reason) == (bad, "error")
    assert outputs[-1].error is caught.value
    given = [output.token for output in outputs[:-1]]
    assert given == good.chosen[chosen:]
    assert bool(given) == (where == "accept")  # the step has run, so its tokens are kept
    list(engine.stream())
    assert (good.chosen, good.finish_reason) == (expected.chosen, "length")
    most = engine.limits.block_size + 9  # tokens of a partly full block, and new tokens
    assert engine.statistics.num_computed_tokens - computed <= most
    (again,) = engine.generate([Request(prompt, 9)])
    assert (again.chosen, again.num_reused) == (expected.chosen, 16)
    engine.check_idle()


def test_tokens_of_several_bytes(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers package")
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False
    )
    raw.train_from_iterator(["true false"], trainer)
    raw.save(str(tmp_path / "tokenizer.json"))
    size, end = raw.get_vocab_size() + 40, raw.token_to_id("</s>")  # embeddings are often padded
    tokenizer = Subwords.from_tokenizers(tmp_path / "tokenizer.json")
    grammars = load_grammars(tmp_path, tokenizer, size, (end,))
    matcher = grammars.from_regex("(true|12)").matcher()

    def allowed() -> set[int]:
        words = matcher.allowed()
        assert words.shape == (-(-size // 32),)
        return {t for t in range(size) if words[t // 32] >> t % 32 & 1}

    assert raw.token_to_id("true") in allowed()
    assert raw.token_to_id("1") in allowed()
    assert raw.token_to_id("2") not in allowed()
    assert not matcher.accept(raw.token_to_id("1"))
    assert allowed() == {raw.token_to_id("2")}
    assert matcher.accept(raw.token_to_id("2"))  # the grammar allows nothing more
    assert allowed() == {end}


def test_clients_ask_for_structure(engine, grammars, openai):
    engine.reset()
    template = ChatTemplate({"default": "{{ messages[0].content }}"})
    schema = {"name": "it", "schema": SCHEMA, "strict": True}
    as_schema = {"type": "json_schema", "json_schema": schema}
    options = {"model": "tiny", "temperature": 1.0, "max_tokens": 54}
    with (
        serving(engine, template=template, grammars=grammars) as address,
        openai_client(address) as client,
    ):
        talk, complete = client.chat.completions.create, client.completions.create
        for choice in talk(messages=HELLO, response_format=as_schema, n=3, **options).choices:
            check_json(choice.message.content)
            assert choice.finish_reason == "stop"
        parts = talk(messages=HELLO, response_format=as_schema, stream=True, **options)
        check_json("".join(part.choices[0].delta.content or "" for part in parts))
        more = {"structured_outputs": {"regex": PATTERN}}
        found = complete(prompt="x", extra_body=more, **options).choices[0].text
        assert re.fullmatch(PATTERN, found)
        more = {"structured_outputs": {"json": SCHEMA}}
        check_json(complete(prompt="x", extra_body=more, **options).choices[0].text)
        text = complete(
            prompt="x", extra_body={"response_format": {"type": "json_object"}}, **options
        )
        assert text.choices[0].text[0] == "{"
        for body, words in (
            ({"response_format": {"type": "xml"}}, "response_format is {'type': 'xml'}, but"),
            ({"response_format": {"type": "json_schema"}}, "or json_schema with a schema"),
            ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "without other field"),
            ({"response_format": {**as_schema, "schema": SCHEMA}}, "without other fields"),
            (
                {"response_format": as_schema, "structured_outputs": {"regex": "a"}},
                "structured_outputs is {'regex': 'a'}, but must be absent if response_format",
            ),
            (
                {"response_format": {"type": "text"}, "structured_outputs": {"regex": "(("}},
                "(?s)structured_outputs: .*unclosed group",
            ),
            ({"structured_outputs": {"json": {"type": "no"}}}, "structured_outputs: Invalid type"),
            ({"structured_outputs": {"regex": "(("}}, "(?s)structured_outputs: .*unclosed group"),
            ({"structured_outputs": {"lark": ""}}, "must have either json, a schema, or regex"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                complete(prompt="x", extra_body=body, **options)
    wait_until_idle(engine)
    assert engine.statistics.num_drafted_tokens == 0
    with serving(engine) as address, openai_client(address) as client:
        more = {"structured_outputs": {"regex": "a"}}
        with pytest.raises(openai.BadRequestError, match="needs llguidance"):
            client.completions.create(prompt="x", extra_body=more, **options)
