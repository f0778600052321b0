"""Text: tokenizers, streams and stop strings. The laws hold for bytes, BPE and a sentencepiece kind."""

import itertools
import json
import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from core.fetch import is_complete, model_dir
from core.stops import StopMatcher
from core.text import ByteTokenizer, FolderTokenizer, TextError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WORDS = "é 你好 🙂🙂"
PROPERTY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write_folder(folder, tokenizer, config=None, model=None, generation=None, template=None):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in (("tokenizer_config", config), ("config", model), ("generation_config", generation)):
        if value is not None:
            (folder / f"{name}.json").write_text(json.dumps(value))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def byte_level_tokenizer():
    """All 256 bytes, three merges, a special token, and a visible added one with letters outside the byte spelling."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "he", "ll", "hell"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool call 你>", special=False, normalized=False)])
    return tokenizer


def sentencepiece_tokenizer(decoder):
    """Words with a mark for the space, and a token for each of the 256 bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "▁", *"abcé", "▁a", "▁ab", "好"]
    merges = [("▁", "a"), ("▁a", "b")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def llama_decoder():
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


def metaspace_decoder():
    return decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte-level": write_folder(base / "byte-level", byte_level_tokenizer()),
        "llama": write_folder(base / "llama", sentencepiece_tokenizer(llama_decoder())),
        "metaspace": write_folder(base / "metaspace", sentencepiece_tokenizer(metaspace_decoder())),
    }


@pytest.fixture(scope="module")
def smollm():
    if not is_complete(model_dir()):
        pytest.skip(f"no converted model in {model_dir()}; run python -m core.fetch")
    return FolderTokenizer(model_dir())


@pytest.fixture(scope="module", params=["bytes", "byte-level", "llama", "metaspace", "smollm"])
def tokenizer(request, folders):
    if request.param == "bytes":
        return ByteTokenizer(vocab_size=300)
    if request.param == "smollm":
        return request.getfixturevalue("smollm")
    return FolderTokenizer(folders[request.param])


def streamed(tokenizer, ids, **options):
    stream = tokenizer.stream(**options)
    parts = [stream.push(token_id) for token_id in ids]
    return "".join(parts) + stream.flush()


# Streams.


@PROPERTY
@given(data=st.data(), skip=st.booleans())
def test_a_stream_gives_exactly_what_decode_gives(tokenizer, data, skip):
    """For every list of ids: specials, lone bytes and ids beyond the vocabulary among them."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    assert tokenizer.decode(ids, skip_special_tokens=skip) == streamed(tokenizer, ids, skip_special_tokens=skip)


def with_reference(tokenizer):
    return tokenizer, Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=["byte-level", "smollm"])
def byte_level_pair(request, folders):
    name = request.param
    return with_reference(request.getfixturevalue(name) if name == "smollm" else FolderTokenizer(folders[name]))


@PROPERTY
@given(data=st.data(), skip=st.booleans())
def test_byte_level_text_equals_that_of_the_tokenizers_package(byte_level_pair, data, skip):
    tokenizer, backend = byte_level_pair
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    assert backend.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@PROPERTY
@given(text=st.text(alphabet="abcé 好你🙂\n", max_size=30), skip=st.booleans())
@pytest.mark.parametrize("name", ["llama", "metaspace"])
def test_sentencepiece_text_equals_that_of_the_tokenizers_package(name, folders, text, skip):
    """For ids that come from text, with BOS in front, which counts as the first token where it is kept."""
    tokenizer, backend = with_reference(FolderTokenizer(folders[name]))
    ids = [1, *tokenizer.encode(text)]
    expected = backend.decode(ids, skip_special_tokens=skip)
    assert expected == tokenizer.decode(ids, skip_special_tokens=skip)
    assert expected == streamed(tokenizer, ids, skip_special_tokens=skip)


@pytest.mark.parametrize("cut", range(1, len(WORDS.encode()) + 1))
def test_a_character_over_several_tokens_comes_whole_wherever_the_text_ends(cut):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(WORDS)[:cut]
    stream = tokenizer.stream()
    parts = [stream.push(token_id) for token_id in ids]
    assert REPLACEMENT not in "".join(parts)
    assert WORDS.startswith("".join(parts))
    whole = WORDS.encode()[:cut].decode(errors="ignore") == WORDS.encode()[:cut].decode(errors="replace")
    assert stream.flush() == ("" if whole else REPLACEMENT)


def test_an_invalid_byte_does_not_stall_the_stream():
    stream = ByteTokenizer().stream()
    assert [stream.push(value) for value in (0xFF, 0x61, 0xF0, 0x9F, 0x62)] == [
        REPLACEMENT,
        "a",
        "",
        "",
        f"{REPLACEMENT}b",
    ]


def test_a_broken_byte_leaves_the_good_characters_of_its_run(folders):
    """The tokenizers package gives up a whole run of byte tokens, which a stream could know only at its end."""
    tokenizer = FolderTokenizer(folders["llama"])
    ids = [3 + value for value in "你".encode() + b"\xff"]
    assert tokenizer.decode(ids) == streamed(tokenizer, ids) == f"你{REPLACEMENT}"


def test_streams_of_two_branches_do_not_share_state():
    tokenizer = ByteTokenizer()
    one, two = tokenizer.stream(), tokenizer.stream()
    assert (one.push(0xC3), two.push(0x61), one.push(0xA9), two.flush()) == ("", "a", "é", "")


def test_text_comes_without_delay(folders):
    """A token of whole characters is given out at once, so that a client sees it in the step that made it."""
    tokenizer = FolderTokenizer(folders["byte-level"])
    stream = tokenizer.stream()
    assert [stream.push(token_id) for token_id in tokenizer.encode("hello")] == ["hell", "o"]


def test_only_the_first_word_loses_its_leading_space(folders):
    for name in ("llama", "metaspace"):
        tokenizer = FolderTokenizer(folders[name])
        word = tokenizer.encode("ab")
        assert tokenizer.decode([1, *word, *word]) == "ab ab"
        assert tokenizer.decode(tokenizer.encode("ab c ")) == "ab c "


@pytest.mark.parametrize(
    "decoder", [None, decoders.WordPiece("##", True), decoders.BPEDecoder("</w>"), decoders.ByteFallback()]
)
def test_other_decoders_stream_what_they_decode(decoder, tmp_path):
    words = ["[UNK]", "a", "##b", ".", "don", "'", "t", "ab</w>", "c</w>", "é", "<0xC3>", "<0xA9>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    if decoder is not None:
        tokenizer.decoder = decoder
    found = FolderTokenizer(write_folder(tmp_path, tokenizer))
    ids = [1, 2, 3, 7, 8, 9, 4, 5, 10, 11, 6, 1, 1, 2, 7]
    for end in range(len(ids) + 1):
        assert found.decode(ids[:end]) == streamed(found, ids[:end])


def test_a_token_costs_the_same_at_the_end_of_a_long_text(folders):
    tokenizer = FolderTokenizer(folders["byte-level"])
    ids = tokenizer.encode("hello 你好 " * 20_000)
    stream = tokenizer.stream()
    start = time.perf_counter()
    for token_id in ids:
        stream.push(token_id)
    assert (time.perf_counter() - start) / len(ids) < 50e-6  # measured: below 1 us


@pytest.mark.parametrize("method", ["decode", "stream"])
def test_a_negative_id_is_an_error_not_another_token(tokenizer, method):
    with pytest.raises(TextError, match="-1 is not a token id"):
        tokenizer.decode([-1]) if method == "decode" else tokenizer.stream().push(-1)


# Encoding.


def test_digits_are_single_tokens(smollm):
    assert smollm.encode("x  2024") == [104, 256, 34, 32, 34, 36]
    assert (smollm.bos_id, smollm.eos_ids, smollm.vocab_size) == (1, frozenset({2}), 49152)


def test_text_survives_encoding(tokenizer):
    for text in ("", "ab ab", "é 你好 🙂🙂", "a\n\n b"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_are_ids():
    assert ByteTokenizer().encode("aé") == [0x61, 0xC3, 0xA9]
    assert ByteTokenizer(add_bos=True).encode("a") == [256, 0x61]
    assert ByteTokenizer(add_bos=True).encode("a", add_special_tokens=False) == [0x61]
    assert ByteTokenizer(300).decode([256, 0x61, 257, 299]) == "a"
    assert ByteTokenizer(300).decode([256, 0x61, 257, 299], skip_special_tokens=False) == "<bos>a<eos>"
    with pytest.raises(TextError, match="at least 258, not 256"):
        ByteTokenizer(256)


def adds_bos(tokenizer):
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


@pytest.mark.parametrize("by", ["post-processor", "tokenizer_config"])
def test_a_prompt_that_starts_with_bos_gets_no_second_one(by, tmp_path):
    tokenizer = byte_level_tokenizer()
    config = {"bos_token": {"content": "<s>"}, "add_bos_token": True}
    folder = write_folder(tmp_path, adds_bos(tokenizer) if by == "post-processor" else tokenizer, config)
    found = FolderTokenizer(folder)
    bos = tokenizer.token_to_id("<s>")
    assert found.bos_id == bos
    assert found.encode("h") == found.encode("<s>h") == [bos, tokenizer.token_to_id("h")]
    assert found.encode("<s><s>h")[:3] == [bos, bos, tokenizer.token_to_id("h")]
    assert found.encode("") == [bos]
    assert found.encode("h", add_special_tokens=False) == [tokenizer.token_to_id("h")]


def test_a_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(TextError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800")


def test_truncation_and_padding_of_a_training_script_are_dropped(tmp_path):
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    assert len(FolderTokenizer(write_folder(tmp_path, tokenizer)).encode("abcdef")) == 6


# Settings of a folder.


@pytest.mark.parametrize(
    "config, model, generation, expected",
    [
        ({}, {"eos_token_id": 1}, {}, {1}),
        ({}, {"eos_token_id": 1}, {"eos_token_id": [2, 3]}, {2, 3}),
        ({"eos_token": "</s>"}, {}, {"eos_token_id": 3}, {3, "</s>"}),
        ({"eos_token": {"content": "</s>"}}, {"eos_token_id": None}, {}, {"</s>"}),
        ({"eos_token": None}, {}, {}, set()),
    ],
)
def test_every_id_that_ends_a_text_is_found(config, model, generation, expected, tmp_path):
    tokenizer = byte_level_tokenizer()
    found = FolderTokenizer(write_folder(tmp_path, tokenizer, config, model, generation))
    assert {tokenizer.token_to_id(item) if isinstance(item, str) else item for item in expected} == found.eos_ids


def test_a_folder_that_is_no_tokenizer_says_so(tmp_path):
    with pytest.raises(TextError, match="is not a folder"):
        FolderTokenizer(tmp_path / "absent")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TextError, match="no usable tokenizer"):
        FolderTokenizer(tmp_path)
    write_folder(tmp_path, byte_level_tokenizer())
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(TextError, match=r"config\.json does not hold a JSON object"):
        FolderTokenizer(tmp_path)


def test_text_needs_neither_torch_nor_transformers():
    script = "import sys; sys.modules.update(torch=None, transformers=None, tokenizers=None, jinja2=None)\n"
    script += "from core.text import *; t = ByteTokenizer(); assert t.decode(t.encode('a')) == 'a'"
    subprocess.run([sys.executable, "-c", script], check=True)


# Chat.


def test_the_default_model_gets_its_default_system_prompt(smollm):
    assert smollm.chat([{"role": "user", "content": "Hi <b>"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm.encode(smollm.chat([{"role": "user", "content": "Hi"}]), add_special_tokens=False)[0] == 1


def with_template(tmp_path, template, config=None):
    return FolderTokenizer(write_folder(tmp_path, byte_level_tokenizer(), config, template=template))


def test_a_template_has_the_helpers_that_templates_count_on(tmp_path):
    template = (
        "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n{% endfor %}\n"
        "{% if add_generation_prompt %}{{ strftime_now('%Y') | length }}{% endif %}"
    )
    tokenizer = with_template(tmp_path, template, {"bos_token": "<s>", "add_bos_token": True})
    messages = [{"role": "skip"}, {"role": "user", "content": "<é & 'x'>"}]
    assert tokenizer.chat(messages) == '<s>{"role": "user", "content": "<é & \'x\'>"}4'
    assert not tokenizer.chat(messages, add_generation_prompt=False).endswith("4")


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'x' + messages[0]['content'] }}", "can only concatenate|must be str"),
        ("{{ messages[0]['absent']['deeper'] }}", "absent"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|append"),
    ],
)
def test_messages_that_a_template_refuses_are_a_text_error(template, reason, tmp_path):
    with pytest.raises(TextError, match=reason):
        with_template(tmp_path, template).chat([{"role": "user", "content": None}])


def test_a_broken_template_is_named_when_the_folder_is_opened(tmp_path):
    with pytest.raises(TextError, match="chat template is broken"):
        with_template(tmp_path, "{% for %}")


def test_a_folder_without_a_template_says_so(tmp_path):
    tokenizer = with_template(tmp_path, None)
    assert not tokenizer.has_chat_template
    with pytest.raises(TextError, match="no chat template"):
        tokenizer.chat([])


def test_of_several_named_templates_the_default_one_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert with_template(tmp_path, None, {"chat_template": named}).chat([]) == "plain"


def test_the_byte_tokenizer_has_a_chat_of_its_own():
    tokenizer = ByteTokenizer()
    assert tokenizer.chat([{"role": "user", "content": "Hi"}]) == "user: Hi\nassistant: "
    assert tokenizer.chat([{"role": "user", "content": "Hi"}], add_generation_prompt=False) == "user: Hi\n"
    with pytest.raises(TextError, match="role and a content"):
        tokenizer.chat([{"role": "user", "content": None}])


# Stop strings.


def run_matcher(pieces, stops, include=False):
    matcher = StopMatcher(stops, include)
    out = ""
    for piece in pieces:
        emitted, matched = matcher.push(piece)
        out += emitted
        if matched is not None:
            break
    return out + matcher.flush(), matcher.matched


def expected_cut(text, stops, include):
    """By the definition, slowly: the first end at which a stop ends, the longest stop there."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def pieces_of(text, cuts):
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@PROPERTY
@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 100), max_size=10),
    include=st.booleans(),
)
def test_how_the_text_is_cut_does_not_change_where_it_stops(text, stops, cuts, include):
    expected = expected_cut(text, stops, include)
    assert expected == run_matcher(pieces_of(text, cuts), stops, include)
    assert expected == run_matcher(list(text), stops, include)


@PROPERTY
@given(text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
def test_held_back_is_exactly_what_may_still_become_a_stop(text, stops):
    matcher, given_out = StopMatcher(stops), ""
    for index, letter in enumerate(text):
        emitted, matched = matcher.push(letter)
        given_out += emitted
        if matched is not None:
            return
        seen = text[: index + 1]
        starts = [stop[:size] for stop in stops for size in range(1, len(stop)) if seen.endswith(stop[:size])]
        assert len(max(starts, key=len, default="")) == len(seen) - len(given_out)


@pytest.mark.parametrize(
    "pieces, stops, expected",
    [
        (["Here A", "BC", "D", "EF"], ("CDE",), ("Here AB", "CDE")),
        (["Here A", "BC", "D", "EF"], ("CDX",), ("Here ABCDEF", None)),
        (["Here ABC", "D"], ("CDX",), ("Here ABCD", None)),
        (["Here A", "BC", "D", "EF"], ("E",), ("Here ABCD", "E")),
        (["xabcd"], ("abcd", "bc"), ("xa", "bc")),
        (["xabcd"], ("bcd", "abcd"), ("x", "abcd")),
        (["xabcd"], ("abcd", "bcd"), ("x", "abcd")),
        (["aab"], ("ab",), ("a", "ab")),
        (["a", "b"], (), ("ab", None)),
    ],
)
def test_stop_strings_cut_where_the_first_one_is_complete(pieces, stops, expected):
    assert expected == run_matcher(pieces, stops)


def test_nothing_is_given_out_after_a_stop():
    matcher = StopMatcher(("ab",), include=True)
    assert matcher.push("xaby") == ("xab", "ab")
    assert matcher.push("z") == ("", "ab")
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(("a", ""))


def test_a_long_stop_string_does_not_make_each_token_slow():
    matcher = StopMatcher(("a" * 50_000 + "b",))
    start = time.perf_counter()
    for _ in range(200):
        matcher.push("a" * 10)
    assert time.perf_counter() - start < 0.5  # measured: 2 ms; a search over all prefixes takes seconds
