"""Topics of documents, on a key-value store: LDA by collapsed Gibbs sampling (Griffiths and Steyvers 2004).

Every worker keeps its documents and the topic of each of their words; the servers keep how often each word has each topic. A
clock is one pass over the documents: pull the counts, draw every word's topic anew, push what has changed.

    python examples/topic_model.py --workers 4 --servers 2 --staleness 1
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from random import Random

import torch

from ringtmp import KeyValueStore
from ringtmp.kv import KeyValueWorker

THEMES = (
    "bread flour oven yeast salt dough crust",
    "goal match team coach league pitch keeper",
    "star moon orbit comet planet sky",
)
WORDS = " ".join(THEMES).split()
TOPICS, ALPHA, BETA = 3, 0.1, 0.1


def documents(count: int) -> list[list[int]]:
    """Each speaks of one theme mostly, and of another a little."""
    draw, found = Random(0), []
    for _ in range(count):
        much, little = draw.sample(THEMES, 2)
        found.append([WORDS.index(draw.choice((much if draw.random() < 0.8 else little).split())) for _ in range(30)])
    return found


def sample(worker: KeyValueWorker, texts: list[list[int]], passes: int) -> None:
    draw = Random(worker.number)
    topics = [[draw.randrange(TOPICS) for _ in text] for text in texts]
    first = torch.zeros(len(WORDS), TOPICS, dtype=torch.int64)
    for text, mine in zip(texts, topics, strict=True):
        first.index_put_((torch.tensor(text), torch.tensor(mine)), torch.tensor(1), accumulate=True)
    worker.push("counts", first)
    worker.clock()
    for _ in range(passes):
        before = worker.pull("counts")
        counts, totals = before.tolist(), before.sum(0).tolist()
        for text, mine in zip(texts, topics, strict=True):
            here = [mine.count(topic) for topic in range(TOPICS)]
            for place, word in enumerate(text):
                row, old = counts[word], mine[place]
                row[old], totals[old], here[old] = row[old] - 1, totals[old] - 1, here[old] - 1
                likely = [
                    (h + ALPHA) * (r + BETA) / (t + BETA * len(WORDS))
                    for h, r, t in zip(here, row, totals, strict=True)
                ]
                new = mine[place] = draw.choices(range(TOPICS), likely)[0]
                row[new], totals[new], here[new] = row[new] + 1, totals[new] + 1, here[new] + 1
        worker.push("counts", torch.tensor(counts) - before)
        worker.clock()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, usual in (("workers", 4), ("servers", 2), ("staleness", 1), ("passes", 30), ("documents", 80)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    tables, texts = {"counts": torch.zeros(len(WORDS), TOPICS, dtype=torch.int64)}, documents(given.documents)
    with (
        KeyValueStore(tables, servers=given.servers, workers=given.workers, staleness=given.staleness) as store,
        ThreadPoolExecutor(given.workers) as pool,
    ):
        shares = [(store.worker(n), texts[n :: given.workers], given.passes) for n in range(given.workers)]
        for done in [pool.submit(sample, *share) for share in shares]:
            done.result()
        counts = store.read("counts")
    print(f"{int(counts.sum())} words, clock {min(store.clocks)}")
    for topic in range(TOPICS):
        best = counts[:, topic].argsort(descending=True)[:6].tolist()
        print(f"topic {topic}: {' '.join(WORDS[word] for word in best)}")
