"""Retrieval at scale: an index of N synthetic passages, what it costs to build, to keep and to ask, and what 21 million would cost.

    make bench_search                               # 100,000 passages, half a minute
    make bench_search ARGS="--passages 1000000"     # 1.3 GB of disk, under /tmp unless --folder says otherwise

Passages have 60 words on average, drawn from a Zipf distribution over two million words: rank r with a weight of (r + 2.7) ** -1.3, so that one word in
twelve is the most frequent one, and six million words hold 228,000 different ones. A query is eight words of one passage, as a question holds some
words of the passage that answers it, the frequent ones too. Building and asking run in processes of their own, so that memory is theirs alone: `own` is
memory that nothing but this process can use (RssAnon in /proc), `mapped` what is cached of the files and given up when memory is short (RssFile).
Times are of one core's work (CPU seconds), so that they are worth something on a busy machine too; the clock is beside them.
"""
import argparse
import json
import multiprocessing
import shutil
import statistics
import tempfile
import threading
import time
from itertools import chain, islice, product
from pathlib import Path

import numpy as np

from common.bm25 import BM25
from common.corpus import read_corpus

VOCABULARY, MEAN_WORDS = 2_000_000, 60


def names() -> np.ndarray:
    """The words, the most frequent first: three letters, then four, then five."""
    spelled = chain.from_iterable(product("etaoinshrdlucmfwygpbvkxjqz", repeat=length) for length in (3, 4, 5))
    return np.array(list(map("".join, islice(spelled, VOCABULARY))), object)


def write_corpus(path: Path, n: int) -> None:
    rng, words = np.random.default_rng(0), names()
    cumulative = np.cumsum((np.arange(VOCABULARY) + 3.7) ** -1.3)
    cumulative /= cumulative[-1]
    with open(path, "w") as file:
        for start in range(0, n, 10_000):
            lengths = rng.integers(MEAN_WORDS // 2, MEAN_WORDS * 3 // 2 + 1, min(10_000, n - start))
            drawn = words[np.searchsorted(cumulative, rng.random(lengths.sum()))].tolist()
            at = 0
            for i, length in enumerate(lengths.tolist(), start):
                file.write(f'{{"id": "{i}", "contents": "\\"{" ".join(drawn[at:at + 2])}\\"\\n{" ".join(drawn[at + 2:at + length])}"}}\n')
                at += length


def memory_mb() -> dict[str, float]:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {"own": int(lines["RssAnon"].split()[0]) / 1024, "mapped": int(lines["RssFile"].split()[0]) / 1024}


class Peak:
    """The highest `own` memory in MB while the block runs, looked at every 20 ms."""

    def __enter__(self):
        self.mb, self._end = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.02):
            self.mb = max(self.mb, memory_mb()["own"])

    def __exit__(self, *error):
        self._end.set()
        self._thread.join()


def build(path: Path, send) -> None:
    before = memory_mb()["own"]
    started, cpu = time.monotonic(), time.process_time()
    with Peak() as peak:
        BM25.from_file(path)
    send.send({"index_s": time.monotonic() - started, "index_cpu_s": time.process_time() - cpu, "own_before_mb": before, "own_peak_mb": peak.mb})


def ask(path: Path, n: int, n_queries: int, in_memory: bool, send) -> None:
    before = memory_mb()
    started = time.thread_time()
    index = BM25(read_corpus(path)) if in_memory else BM25.from_file(path)
    opened = time.thread_time() - started
    rng = np.random.default_rng(1)
    with open(path, "rb") as file:  # lines at random places of the file
        queries = []
        for at in rng.integers(0, path.stat().st_size * 99 // 100, n_queries).tolist():
            file.seek(at)
            file.readline()
            queries.append(" ".join(rng.choice(json.loads(file.readline())["contents"].split(), 8)))
    seconds, clock, found = [], time.monotonic(), []
    for query in queries:
        begun = time.thread_time()
        found += index.search([query], 3)
        seconds.append(time.thread_time() - begun)
    send.send({"opened_s": opened, "queries_per_s": n_queries / sum(seconds), "clock_s": time.monotonic() - clock, "median_ms": 1000 * statistics.median(seconds), "p99_ms": 1000 * sorted(seconds)[int(0.99 * n_queries)],
               "hits": [[(hit.passage.id, hit.score) for hit in hits] for hits in found], "before": before, **memory_mb()})


def in_process(work, *args) -> dict:
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(*args, send))
    process.start()
    send.close()
    result = receive.recv()
    process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--encoder", help="measure a dense index instead: folder or hub id of a text encoder")
    parser.add_argument("--folder", type=Path, help="where to put the corpus and its index; kept there (default: a temporary folder)")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    try:
        folder.mkdir(exist_ok=True, parents=True)
        if args.encoder:
            measure_dense(folder, args.passages, args.encoder)
        else:
            measure(folder / f"corpus{args.passages}.jsonl", args.passages, args.queries)
    finally:
        if not args.folder:
            shutil.rmtree(folder)


def measure_dense(folder: Path, n: int, name: str) -> None:
    """Encoding, on 256 of the passages; exact search among n random vectors."""
    from common.dense import Dense, Encoder

    encoder = Encoder(name)
    write_corpus(folder / "few.jsonl", 256)
    few = Dense.from_file(folder / "few.jsonl", encoder)  # the first batch is slow
    texts = [passage.contents for passage in few.passages]
    started = time.process_time()
    encoder.encode(texts, encoder.passage_prefix)
    passage_s = (time.process_time() - started) / len(texts)
    rng = np.random.default_rng(0)
    with open(folder / "vectors.f16", "wb") as file:
        for start in range(0, n, 10_000):
            vectors_ND = rng.standard_normal((min(10_000, n - start), encoder.dim), np.float32)
            (vectors_ND / np.linalg.norm(vectors_ND, axis=1, keepdims=True)).astype(np.float16).tofile(file)
    index = Dense(few.passages, np.memmap(folder / "vectors.f16", np.float16, "r").reshape(-1, encoder.dim), encoder)
    print(f"{encoder}\nencoded at {1 / passage_s:.0f} passages/s; 21 million: {21e6 * passage_s / 3600:.0f} hours, {21e6 * 2 * encoder.dim / 1e9:.0f} GB")
    for batch in (1, 64):
        vectors_QD = encoder.encode(["a question of eight words or so it is"] * batch, encoder.query_prefix)
        index._exactly(vectors_QD, 3)
        started = time.process_time()
        index._exactly(vectors_QD, 3)
        search_s = time.process_time() - started
        print(f"exact search among {n:,} vectors, {batch} at once: {batch / search_s:.1f} queries/s; among 21 million {batch / search_s * n / 21e6:.2f}")


def measure(path: Path, n: int, n_queries: int) -> None:
    started = time.monotonic()
    write_corpus(path, n)
    print(f"{n:,} passages written in {time.monotonic() - started:.0f} s, {path.stat().st_size / 1e6:,.0f} MB", flush=True)
    shutil.rmtree(f"{path}.bm25", ignore_errors=True)
    built = in_process(build, path)
    files = {file.name: file.stat().st_size for file in Path(f"{path}.bm25/index").iterdir()}
    size, n_words = sum(files.values()), files["caps.f32"] // 4
    print(f"indexed in {built['index_cpu_s']:.1f} s (by the clock {built['index_s']:.1f} s); {size / 1e6:,.0f} MB, {size / path.stat().st_size:.2f} of the corpus; "
          f"{n_words:,} words, {files['docs.i32'] // 4:,} postings\n"
          f"memory while indexing: own {built['own_before_mb']:.0f} MB before, {built['own_peak_mb']:.0f} MB at most", flush=True)
    asked = in_process(ask, path, n, n_queries, False)
    print(f"mapped: opened in {asked['opened_s']:.2f} s; {asked['queries_per_s']:.0f} queries/s one by one (all {n_queries} by the clock in {asked['clock_s']:.1f} s), "
          f"median {asked['median_ms']:.1f} ms, p99 {asked['p99_ms']:.1f} ms; own {asked['before']['own']:.0f} -> {asked['own']:.0f} MB, "
          f"mapped {asked['before']['mapped']:.0f} -> {asked['mapped']:.0f} MB", flush=True)
    if n <= 200_000:
        inside = in_process(ask, path, n, n_queries, True)
        if inside["hits"] != asked["hits"]:
            raise SystemExit("error: the two indexes disagree")
        print(f"in memory (bm25s): built in {inside['opened_s']:.1f} s; {inside['queries_per_s']:.0f} queries/s, median {inside['median_ms']:.1f} ms, "
              f"p99 {inside['p99_ms']:.1f} ms; own {inside['own']:.0f} MB; the same hits and scores for all {n_queries} queries")
    times = 21e6 / n
    print(f"21 million such passages, everything in proportion: indexed in {built['index_cpu_s'] * times / 60:.0f} minutes, index {size * times / 1e9:.1f} GB, "
          f"corpus {path.stat().st_size * times / 1e9:.1f} GB, {asked['queries_per_s'] / times:.1f} queries/s")


if __name__ == "__main__":
    main()
