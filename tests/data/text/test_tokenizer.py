"""Every byte of a text is in exactly one token, whatever the text holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from meshkit.data import Tokenizer, load_tokenizer, save_tokenizer, token_bytes, train_tokenizer
from meshkit.errors import DataError

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
TEXTS = UNICODE | st.lists(UNICODE | st.sampled_from(["<|bos|>", "<|eos|>", "  \n\t", "def "])).map("".join)


@settings(deadline=None)
@given(text=TEXTS)
def test_bytes_of_tokens_add_up_to_the_bytes_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert int(token_bytes(tokenizer)[ids].sum()) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids), "text cannot fake a document boundary"


@settings(deadline=None)
@given(texts=st.lists(TEXTS, max_size=4))
def test_document_is_bos_text_eos(tokenizer: Tokenizer, texts: list[str]) -> None:
    documents = [document.tolist() for document in tokenizer.encode_documents(texts)]
    assert documents == [[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] for text in texts]


def test_training_is_deterministic_and_fills_the_vocabulary(tokenizer: Tokenizer) -> None:
    text = "some words and some more words, said again and then once again\n"
    one, two = (train_tokenizer([text, text], vocab_size=270, extra_special_tokens=["<|user|>"]) for _ in range(2))
    assert one.backend.to_str() == two.backend.to_str()
    assert (one.fingerprint, one.vocab_size) == (two.fingerprint, 270)
    assert one.fingerprint != tokenizer.fingerprint
    assert [one.backend.id_to_token(i) for i in range(3)] == ["<|bos|>", "<|eos|>", "<|user|>"]
    assert token_bytes(one)[:3].tolist() == [0, 0, 0]
    assert len(one.encode(text)) < len(text)


def test_saved_folder_loads_the_same_here_and_in_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tokenizer, tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.fingerprint, loaded.bos_id, loaded.eos_id) == (tokenizer.fingerprint, 0, 1)
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "def naïve(x):\n\treturn '東京 🙂'  # every mesh\n"
    assert loaded.encode(text) == oracle(text, add_special_tokens=False)["input_ids"]
    assert (oracle.bos_token_id, oracle.eos_token_id) == (0, 1)


def sentencepiece_like() -> tokenizers.Tokenizer:
    """The shape of Llama 2's tokenizer: spaces as ▁, one in front, unknown characters as bytes."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "é", "▁h", "<0x"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "h")], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


@settings(deadline=None)
@given(text=st.text(st.sampled_from("hé 🙂東x"), min_size=1, max_size=20))
def test_bytes_of_sentencepiece_tokens_count_the_space_in_front(text: str) -> None:
    tokenizer = Tokenizer(backend=sentencepiece_like(), bos_id=0, eos_id=1)
    assert int(token_bytes(tokenizer)[tokenizer.encode(text)].sum()) == len((" " + text).encode())


def test_bytes_of_added_words_and_of_composed_accents() -> None:
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    backend.add_tokens(["<tool>"])
    tokenizer = Tokenizer(backend=backend, bos_id=None, eos_id=256)
    ids = tokenizer.encode("e\u0301<tool>")
    assert len(ids) == 3
    assert int(token_bytes(tokenizer)[ids].sum()) == len("é<tool>".encode())
    assert tokenizer.encode_documents(["a"])[0].tolist() == [*tokenizer.encode("a"), 256], "no bos, none written"


def test_tokenizer_that_loses_bytes_has_no_bytes_per_token() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "[SEP]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(DataError, match=r"not defined for a tokenizer with the decoder .*WordPiece"):
        token_bytes(Tokenizer(backend=backend, bos_id=None, eos_id=1))


def test_bad_tokenizer_folders_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: there is no such folder. Name one .*; nothing is downloaded"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"tokenizer.json: no tokenizer there. Train one"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"half": ')
    with pytest.raises(DataError, match=r"tokenizer.json: not a tokenizer"):
        load_tokenizer(tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    with pytest.raises(DataError, match="has no token '</s>'"):
        load_tokenizer(tmp_path, eos_token="</s>")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer_config.json is missing: meshkit_digests.json lists it"):
        load_tokenizer(tmp_path)
    (tmp_path / "meshkit_digests.json").unlink()  # as of a folder that another program wrote
    with pytest.raises(DataError, match=r"nothing says which token ends a document. Pass eos_token"):
        load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, eos_token="<|eos|>").bos_id is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|eos|>"}}))
    assert load_tokenizer(tmp_path).eos_id == 1
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json is not valid JSON"):
        load_tokenizer(tmp_path)


def test_vocabulary_too_small_for_the_bytes_is_refused() -> None:
    with pytest.raises(
        DataError, match="vocab_size=256 is too small: 256 bytes and 2 special tokens need at least 258"
    ):
        train_tokenizer(["x"], vocab_size=256)
