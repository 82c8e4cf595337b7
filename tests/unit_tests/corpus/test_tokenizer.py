# SPDX-License-Identifier: Apache-2.0
"""Special ids come from the model; a trained model gives texts back exactly."""

import io

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dyn.corpus import CorpusError, SentencePieceTokenizer
from megatron_dyn.corpus.inputs import InputSelection
from megatron_dyn.corpus.tokenizer_training import TokenizerTrainingConfig, train_tokenizer


@pytest.mark.parametrize(
    ("name", "vocab_size", "unk", "bos", "eod", "pad"),
    [("mistral_v1_32k", 32000, 0, 1, 2, None), ("sp_test_en_1000", 1000, 0, 1, 2, None), ("seqio_test", 26, 2, None, 1, 0)],
)
def test_special_ids_are_the_models_and_never_minus_one(shared, name, vocab_size, unk, bos, eod, pad):
    tokenizer = SentencePieceTokenizer(shared / "data" / "tokenizers" / f"{name}.model")
    assert (tokenizer.vocab_size, tokenizer.unk, tokenizer.bos, tokenizer.eod, tokenizer.pad) == (vocab_size, unk, bos, eod, pad)
    assert -1 not in tokenizer.encode("</s> <s> <pad> a b \n \U0001f600")


def test_specials_in_a_text_stay_text(shared):
    tokenizer = SentencePieceTokenizer(shared / "data" / "tokenizers" / "sp_test_en_1000.model")
    assert not {1, 2} & set(tokenizer.encode("x</s>y<s>z"))


def test_an_end_that_a_text_can_spell_is_not_an_end_of_document(tmp_path):
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c d e f g"] * 9), model_writer=out, vocab_size=30, hard_vocab_limit=False, user_defined_symbols=["</s>"], minloglevel=2
    )
    (tmp_path / "forge.model").write_bytes(out.getvalue())
    tokenizer = SentencePieceTokenizer(tmp_path / "forge.model")
    piece = tokenizer.processor.piece_to_id("</s>")
    assert piece in tokenizer.encode("a</s>b"), "a text does spell it"
    assert tokenizer.eod is None and piece not in (tokenizer.bos, tokenizer.pad)


def test_unusable_models(tmp_path):
    with pytest.raises(CorpusError, match="no such tokenizer model"):
        SentencePieceTokenizer(tmp_path / "missing.model")
    for content in (b"", b"not a model" * 20):
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(CorpusError, match="not a usable SentencePiece model"):
            SentencePieceTokenizer(tmp_path / "bad.model")


def test_a_lone_surrogate_is_named(tokenizer_model):
    with pytest.raises(CorpusError, match=r"lone surrogate U\+DC00 at character 2"):
        SentencePieceTokenizer(tokenizer_model).encode("ab\udc00")


# U+2581 is SentencePiece's own sign for a space and comes back as one; surrogates are no text.
any_text = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\u2581")) | st.text("ab \t\n\r", max_size=30)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(any_text)
def test_a_trained_model_gives_every_text_back(tokenizer_model, text):
    tokenizer = SentencePieceTokenizer(tokenizer_model)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk not in ids and tokenizer.eod not in ids and (ids or not text)


def test_training_is_repeatable_and_atomic(tmp_path, jsonl_file, tokenizer_model):
    (tmp_path / "again.model.partial").write_bytes(b"left by a killed run")
    sample = train_tokenizer(
        TokenizerTrainingConfig(selection=InputSelection(inputs=[str(jsonl_file)]), model_prefix=str(tmp_path / "again"), vocab_size=400)
    )
    assert (tmp_path / "again.model").read_bytes() == tokenizer_model.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["again.model"]
    assert sample.documents == sample.seen == 600


def test_the_sample_is_bounded_spread_and_repeatable(tmp_path, jsonl_file):
    size = jsonl_file.stat().st_size
    progress = []

    def train(name):
        config = TokenizerTrainingConfig(
            selection=InputSelection(inputs=[str(jsonl_file)]), model_prefix=str(tmp_path / name), vocab_size=320, max_bytes=size // 4
        )
        return train_tokenizer(config, lambda done, total: progress.append(done / total))

    first, second = train("a"), train("b")
    assert first == second and (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()
    assert size // 5 < first.text_bytes <= size // 4 and first.documents < first.seen
    assert min(progress) < 0.2 and max(progress) > 0.8, "documents from the whole input"


def test_bad_records_are_left_out_of_the_sample_or_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text":"a b c"}\n' * 50 + b"broken\n")
    config = dict(selection=InputSelection(inputs=[str(path)]), model_prefix=str(tmp_path / "m"), vocab_size=300)
    with pytest.raises(CorpusError, match="line 51"):
        train_tokenizer(TokenizerTrainingConfig(**config, on_bad_record="error"))
    with pytest.raises(CorpusError, match="could not train 300 pieces on 850 bytes.*smaller --vocab-size"):
        train_tokenizer(TokenizerTrainingConfig(**config))
    assert [found.name for found in tmp_path.iterdir()] == ["x.jsonl"]
    with pytest.raises(CorpusError, match="at least 300"):
        TokenizerTrainingConfig(**(config | {"vocab_size": 200}))
