"""Chat templates: the text of a conversation, compared with what transformers renders."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("jinja2", reason="chat templates need the serve extra")

from examples.engine.http.chat import ChatTemplate, load_chat_template
from examples.options import checkpoint_directory
from examples.text import Subwords

TURNS = """
{{- bos_token }}
{%- if tools %}
    {{- '<|tools|>' + tools | tojson + '\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('no such role: ' + message.role) }}
    {%- endif %}
    {%- if message.role == 'tool' and loop.last %}{% continue %}{% endif %}
    {{- '<|' + message.role + '|>' + message.content | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' + call.function.name + call.function.arguments | tojson }}
    {%- endfor %}
    {{- eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""
MARKED = """
{% set seen = namespace(system=false) %}
{% for message in messages %}
    {% if message['role'] == 'system' %}{% set seen.system = true %}{% endif %}
    {% if message['role'] == 'assistant' %}
        {% generation %}
Answer: {{ message['content'] }}
        {% endgeneration %}
    {% else %}
Line {{ loop.index }}: {{ message['content'] | upper }}{{ mood | default('') }}
    {% endif %}
{% endfor %}
{{ 'system' if seen.system }} {{ documents is none }}
"""
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"é": "<&>"}}}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TALKS = {
    "one": [{"role": "user", "content": " hello <é> "}],
    "turns": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "nothing"},
    ],
    "tools": [
        {"role": "user", "content": "call it"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
    ],
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_conversation_becomes_text():
    template = ChatTemplate({"default": TURNS}, SPECIAL)
    assert template.render(TALKS["turns"]) == (
        "<s><|system|>be brief</s>\n<|user|>hello</s>\n<|assistant|>yes?</s>\n"
        "<|user|>nothing</s>\n<|assistant|>"
    )
    assert template.render(TALKS["one"], tools=TOOLS, add_generation_prompt=False) == (
        '<s><|tools|>[{"type": "function", "function": {"name": "f", "parameters": '
        '{"é": "<&>"}}}]\n<|user|>hello <é></s>\n'
    )
    assert '\nf{"x": 1}</s>' in template.render(TALKS["tools"])


def test_templates_see_what_a_request_adds():
    template = ChatTemplate({"default": MARKED, "tool_use": "with {{ tools | length }}"})
    assert "Line 1:  HELLO <É> !" in template.render(TALKS["one"], mood="!")
    assert template.render(TALKS["one"], tools=TOOLS) == "with 1"
    assert "Line 1" in template.render(TALKS["one"], self=1, messages=[])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ nothing.there }}", "'nothing' is undefined"),
        ("{{ messages[0].content + 1 }}", "str"),
    ],
)
def test_errors_of_a_template_are_reported(source, words):
    with pytest.raises(ValueError, match=f"chat template rejects them: .*{words}"):
        ChatTemplate({"default": source}).render(TALKS["one"])


def test_a_broken_template_is_reported():
    with pytest.raises(ValueError, match=r"cannot be read: .*endfor"):
        ChatTemplate({"default": "{% for a in b %}"})


def test_templates_are_found_where_checkpoints_keep_them(tmp_path):
    assert load_chat_template(tmp_path) is None
    config = {"bos_token": {"content": "<b>"}, "chat_template": "{{ bos_token }}1"}
    named = [{"name": "default", "template": "2"}, {"name": "tool_use", "template": "3"}]
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(config))
    assert load_chat_template(tmp_path).render([]) == "<b>1"
    file.write_text(json.dumps({**config, "chat_template": named}))
    assert load_chat_template(tmp_path).render([], tools=TOOLS) == "3"
    for wrong in ([{"name": "default"}], ["text"], 5, [{"name": "default", "template": 5}]):
        file.write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(ValueError, match="chat_template in tokenizer_config"):
            load_chat_template(tmp_path)
    file.write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}4")
    assert load_chat_template(tmp_path).render([]) == "<b>4"
    (tmp_path / "mine").write_text("5")
    assert load_chat_template(tmp_path, str(tmp_path / "mine")).render([]) == "5"
    with pytest.raises(ValueError, match=r"--chat-template: .*/none: .*No such file"):
        load_chat_template(tmp_path, str(tmp_path / "none"))


def test_the_bundled_model_has_a_template():
    template = load_chat_template(checkpoint_directory("byte-gemma"))
    assert template.render(TALKS["turns"]) == "be brief\nhello\nyes?\nnothing\n"


@pytest.mark.transformers
@pytest.mark.parametrize("source", [TURNS, MARKED], ids=["turns", "marked"])
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "with-tools"])
@pytest.mark.parametrize("begins", [True, False], ids=["begins", "ends"])
def test_text_and_tokens_match_transformers(tmp_path, source, talk, tools, begins):
    transformers = pytest.importorskip("transformers", reason="needs the transformers extra")
    tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers package")
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(["hello nothing be brief"], trainer)
    raw.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", raw.add_special_tokens(["<s>"]) and 256)]
    )
    raw.add_special_tokens(["<s>", "</s>"])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **SPECIAL)
    theirs.chat_template = source
    theirs.save_pretrained(tmp_path)

    template = load_chat_template(tmp_path)
    text = template.render(TALKS[talk], tools=tools, add_generation_prompt=begins)
    options = {"tools": tools, "add_generation_prompt": begins}
    assert text == theirs.apply_chat_template(TALKS[talk], tokenize=False, **options)
    ours = Subwords.from_tokenizers(tmp_path / "tokenizer.json")
    found = theirs.apply_chat_template(TALKS[talk], tokenize=True, return_dict=False, **options)
    assert ours.encode(text, special_tokens=False) == list(found)
    assert ours.encode(text) != list(found)  # it adds <s>
