"""Dense retrieval: passages and queries as vectors of a text encoder (E5, BGE, MiniLM), the nearest by cosine. The same search(queries, k) as BM25.

The vectors lie memory-mapped beside the corpus, in `<corpus>.dense/index/vectors.f16` (N x D, rows of length 1), so memory does not grow with the
corpus while they are made; a stopped build goes on where it was. They are searched exactly, a block at a time; or by a faiss index made from
them, kept in `<corpus>.faiss/`, which is faster and, except Flat, approximate. Scores of one query may differ in the last bits with the batch
it came in, as matrix products do.

E5: arXiv 2212.03533. BGE: arXiv 2309.07597. Prefixes and pooling are those of the models' cards.
"""
import hashlib
import json
import re
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoModel, AutoTokenizer
from transformers.utils import cached_file

from common import UserError
from common.corpus import Hit, MappedPassages, best_first, clean_queries, kept_index, map_array, say, write_offsets

PREFIXES = [  # (in the name of the encoder, before a query, before a passage); None: it has to be given
    (r"e5-mistral|e5\b.*instruct", None, None),  # a task's description before each query
    (r"e5\b", "query: ", "passage: "),
    (r"bge-m3\b", "", ""),
    (r"bge\b.*-zh\b", "为这个句子生成表示以用于检索相关文章：", ""),
    (r"bge\b", "Represent this sentence for searching relevant passages: ", ""),
]
CHUNK = 4096  # passages encoded between two writes, sorted by length among themselves
BATCH = 64
BLOCK = 1 << 15  # vectors compared at once


class Encoder:
    """A text encoder with its pooling and prefixes. Threads may share one; they take turns.

    name_or_path: folder or hub id. pooling: "mean", "cls" or "auto", as the encoder's 1_Pooling/config.json says. query_prefix, passage_prefix:
    None takes those of E5 or BGE if that is what the name says, otherwise none. Raises UserError if something is missing or not known.
    """

    def __init__(self, name_or_path: str, *, pooling: str = "auto", query_prefix: str | None = None, passage_prefix: str | None = None,
                 max_tokens: int = 256, device: str = "cpu"):
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"no GPU for device {device!r} (torch {torch.__version__} sees none): use --device cpu, or a CUDA build of torch")
        if max_tokens < 8:
            raise UserError(f"--max-tokens {max_tokens} leaves no room for a text; give at least 8")
        looks_like_path = name_or_path.startswith((".", "~", "/")) or name_or_path.count("/") > 1 or Path(name_or_path).exists()
        if looks_like_path and not (Path(name_or_path).expanduser() / "config.json").is_file():
            raise UserError(f"no encoder at {name_or_path} (no config.json there); give the folder or hub id of a text encoder such as intfloat/e5-base-v2")
        self.name, name_or_path = name_or_path, str(Path(name_or_path).expanduser())
        self.pooling = _pooling(name_or_path) if pooling == "auto" else pooling
        self.query_prefix, self.passage_prefix = _prefixes(name_or_path, query_prefix, passage_prefix)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name_or_path)
            self._model = AutoModel.from_pretrained(name_or_path, dtype=torch.float16 if device.startswith("cuda") else torch.float32)
            self._model.eval().requires_grad_(False).to(device)
        except (OSError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
            raise UserError(f"cannot load the encoder {name_or_path!r} ({str(error).strip().splitlines()[0]}); give the folder or hub id of a text "
                            "encoder such as intfloat/e5-base-v2, and a device that there is") from error
        if not hasattr(self._model.config, "hidden_size") or self._model.config.is_encoder_decoder:
            raise UserError(f"{name_or_path!r} is a {type(self._model).__name__}, not a text encoder; give one such as intfloat/e5-base-v2")
        self._tokenizer.padding_side = "right"  # the first vector must be that of [CLS]
        self.max_tokens = min(max_tokens, self._tokenizer.model_max_length)
        self.device, self.dim = device, self._model.config.hidden_size
        digest = hashlib.sha256(json.dumps(self._tokenizer.get_vocab(), sort_keys=True).encode())
        for key, tensor in sorted(self._model.state_dict().items()):
            digest.update(key.encode() + tensor.half().cpu().numpy().tobytes())  # half: a GPU's vectors may be served on a CPU
        self.settings = {"encoder": digest.hexdigest(), "pooling": self.pooling, "passage_prefix": self.passage_prefix, "max_tokens": self.max_tokens}
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return (f"encoder {self.name}: {self.dim} dimensions, {self.pooling} pooling, {self.max_tokens} tokens at most, "
                f"queries begin with {self.query_prefix!r}, passages with {self.passage_prefix!r}")

    def encode(self, texts: list[str], prefix: str) -> np.ndarray:
        """Vectors of length 1 (float32, N x D) of `texts`, each behind the prefix."""
        vectors_ND = np.empty((len(texts), self.dim), np.float32)
        by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # little padding
        with self._lock, torch.inference_mode():
            for start in range(0, len(texts), BATCH):
                rows = by_length[start:start + BATCH]
                batch = self._tokenizer([prefix + texts[i] for i in rows], padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt")
                batch = batch.to(self.device)
                hidden_BTD = self._model(**batch).last_hidden_state.float()
                if self.pooling == "cls":
                    pooled_BD = hidden_BTD[:, 0]
                else:
                    mask_BT1 = batch["attention_mask"][..., None].float()
                    pooled_BD = (hidden_BTD * mask_BT1).sum(1) / mask_BT1.sum(1)
                vectors_ND[rows] = torch.nn.functional.normalize(pooled_BD, dim=-1).cpu().numpy()
        return vectors_ND


def _pooling(name_or_path: str) -> str:
    try:
        path = cached_file(name_or_path, "1_Pooling/config.json", _raise_exceptions_for_missing_entries=False)
        modes = json.loads(Path(path).read_text()) if path else {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the pooling of the encoder {name_or_path!r} ({str(error).strip().splitlines()[0]}); give a folder or hub id, "
                        "or say --pooling mean or cls") from error
    on = [key for key, value in modes.items() if key.startswith("pooling_mode_") and value]
    for mode, key in (("mean", "pooling_mode_mean_tokens"), ("cls", "pooling_mode_cls_token")):
        if on == [key]:
            return mode
    raise UserError(f"the encoder {name_or_path!r} " + (f"pools by {', '.join(on)}, which is not built; use one with mean or CLS pooling" if on else
                    "does not say how it pools (no 1_Pooling/config.json): give --pooling mean (E5, MiniLM) or --pooling cls (BGE)"))


def _prefixes(name: str, query: str | None, passage: str | None) -> tuple[str, str]:
    path = Path(name)
    name = (path.parents[1] if path.parent.name == "snapshots" else path).name.lower().replace("_", "-")  # the hub's cache: models--NAME/snapshots/COMMIT
    known = next(((q, p) for pattern, q, p in PREFIXES if re.search(rf"\b(?:{pattern})", name)), ("", ""))
    query, passage = (known[0] if query is None else query), (known[1] if passage is None else passage)
    if query is None or passage is None:
        raise UserError(f"{name} expects the description of a task before a query: give --query-prefix and --passage-prefix, as its model card says")
    return query, passage


class Dense:
    """Passages by the cosine of their vector and the query's. Threads may share one."""

    def __init__(self, passages: MappedPassages, vectors_ND: np.ndarray, encoder: Encoder, faiss_index=None):
        self.passages, self._vectors_ND, self._encoder, self._faiss = passages, vectors_ND, encoder, faiss_index

    def __len__(self) -> int:
        return len(self.passages)

    @classmethod
    def from_file(cls, corpus_path: str | Path, encoder: Encoder, *, faiss: str = "", nprobe: int = 32) -> "Dense":
        """Open a corpus with its vectors and, if `faiss` describes one, its faiss index; both are made first where they are not there yet."""
        if faiss:
            _faiss()  # a missing package shows before hours of encoding
        path = Path(corpus_path).resolve()
        try:
            settings = {"format": 1, **encoder.settings}
            folder = kept_index(path, "dense", settings, lambda part: _encode(path, part, encoder, settings), resumable=True)
            vectors_ND = map_array(folder / "vectors.f16", np.float16).reshape(-1, encoder.dim)
            index = None
            if faiss:
                manifest = json.loads((folder / "manifest.json").read_text())
                settings = {"format": 1, "faiss": faiss, "vectors": manifest["files"]["vectors.f16"]["sha256"]}
                made = kept_index(path, "faiss", settings, lambda part: _build_faiss(vectors_ND, faiss, part, manifest["corpus"]))
                index = _read_faiss(made, nprobe)
        except OSError as error:
            raise UserError(f"cannot keep the dense index beside {path} ({error.strerror or error}); make room there or move the corpus to where there is "
                            "(two bytes per passage and dimension); what is encoded already stays") from error
        return cls(MappedPassages(path, folder), vectors_ND, encoder, index)

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """k hits per query (all, if there are fewer), best first, equal scores in corpus order; scores are cosines. Empty queries find nothing."""
        queries = clean_queries(queries, k)
        asked = [i for i, query in enumerate(queries) if query]
        results: list[list[Hit]] = [[] for _ in queries]
        if asked:
            vectors_QD = self._encoder.encode([queries[i] for i in asked], self._encoder.query_prefix)
            find = self._by_faiss if self._faiss is not None else self._exactly
            for i, (docs, scores) in zip(asked, find(vectors_QD, min(k, len(self))), strict=True):
                results[i] = [Hit(self.passages[int(doc)], float(score)) for doc, score in zip(docs, scores)]
        return results

    def _exactly(self, vectors_QD: np.ndarray, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(passages, scores) of every query, best first."""
        best = [(np.empty(0, np.int64), np.empty(0, np.float32))] * len(vectors_QD)
        for start in range(0, len(self._vectors_ND), BLOCK):
            scores_QN = vectors_QD @ self._vectors_ND[start:start + BLOCK].astype(np.float32).T
            for q, new in enumerate(scores_QN):
                places = best_first(new, k)
                docs, scores = np.concatenate((best[q][0], start + places)), np.concatenate((best[q][1], new[places]))
                keep = best_first(scores, k)  # earlier passages stand before later ones, so ties keep corpus order
                best[q] = docs[keep], scores[keep]
        return best

    def _by_faiss(self, vectors_QD: np.ndarray, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        results = []
        for scores, docs in zip(*self._faiss.search(vectors_QD, k)):
            scores, docs = scores[docs >= 0], docs[docs >= 0]  # -1: the cells searched hold fewer than k
            order = np.lexsort((docs, -scores))
            results.append((docs[order], scores[order]))
        return results


def _encode(corpus: Path, part: Path, encoder: Encoder, settings: dict) -> dict:
    """Write the vectors of all passages into `part`, going on behind those that a stopped build of the same kind has left there."""
    stat = corpus.stat() if corpus.exists() else None
    begun = json.dumps({**settings, "corpus": stat and [stat.st_size, stat.st_mtime_ns]})
    begun_file, vectors_file, record = part / "begun.json", part / "vectors.f16", {}
    done = 0
    if begun_file.exists() and begun_file.read_text() == begun and vectors_file.exists():
        done = vectors_file.stat().st_size // (2 * encoder.dim * CHUNK) * CHUNK
        say(f"going on with passage {done:,}, where encoding {corpus} was stopped")
    begun_file.write_text(begun)
    passages = write_offsets(corpus, part, record)
    with open(vectors_file, "ab") as file:
        file.truncate(2 * encoder.dim * done)
        for _ in islice(passages, done):  # their offsets are written again
            pass
        while chunk := list(islice(passages, CHUNK)):
            encoder.encode([p.contents for p in chunk], encoder.passage_prefix).astype(np.float16).tofile(file)
            file.flush()
    return record


# ---- faiss, an optional package ----------------------------------------------------------------------------------------------------------

def _faiss():
    try:
        import faiss
    except ImportError as error:
        raise UserError("--faiss needs the package faiss-cpu, which is not installed: .venv/bin/python -m pip install faiss-cpu==1.15.1; without "
                        "--faiss the dense index is searched exactly") from error
    return faiss


def _build_faiss(vectors_ND: np.ndarray, description: str, part: Path, corpus_record: dict) -> dict:
    faiss = _faiss()
    try:
        index = faiss.index_factory(vectors_ND.shape[1], description, faiss.METRIC_INNER_PRODUCT)
        if not index.is_trained:
            sample = vectors_ND[::-(-len(vectors_ND) // (1 << 19))].astype(np.float32)
            say(f"training the faiss index {description} on {len(sample):,} vectors")
            index.train(sample)
        for start in range(0, len(vectors_ND), BLOCK):
            index.add(vectors_ND[start:start + BLOCK].astype(np.float32))
        faiss.write_index(index, str(part / "index.faiss"))
    except RuntimeError as error:
        reason = str(error).strip().rsplit(": ", 1)[-1]
        raise UserError(f"faiss cannot make the index {description!r} of {len(vectors_ND):,} vectors ({reason}); give another --faiss: Flat, or for "
                        "large corpora one such as IVF4096,SQ8") from error
    return corpus_record


def _read_faiss(folder: Path, nprobe: int):
    faiss = _faiss()
    try:
        index = faiss.read_index(str(folder / "index.faiss"), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    except RuntimeError as error:
        raise UserError(f"faiss {faiss.__version__} cannot read {folder} ({str(error).strip().splitlines()[0]}); remove that folder to have it made again") from error
    cells = faiss.try_extract_index_ivf(index)
    if cells is not None:
        cells.nprobe = nprobe
    return index
