"""Reading transformers' masks, without transformers: a reading must show what its mask shows."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest

import jattn
from jattn import spec
from jattn.integrations import transformers as host
from jattn.integrations.transformers import masks
from tests.support.processes import ROOT

KINDS = {
    "causal": lambda i, j, w: j <= i,
    "window": lambda i, j, w: (j <= i) & (j > i - w),
    "chunks": lambda i, j, w: (j <= i) & (i // w == j // w),
    "window both ways": lambda i, j, w: abs(i - j) < w,
    "prefix": lambda i, j, w: (j <= i) | (j < w),
    "blocks": lambda i, j, w: i // w == j // w,
    "packed": lambda i, j, w: (i // w == j // w) & (j <= i),
    "full": lambda i, j, w: j >= 0 * i,
}
# Masks of models with a cache, which pass some of the queries at a time.
CACHED = {
    **{kind: KINDS[kind] for kind in ("causal", "window", "chunks", "prefix")},
    "picture in a window": lambda i, j, w: (
        ((j <= i) & (j > i - w - 3)) | ((i // 4 == 1) & (j // 4 == 1))
    ),
}


def draw(rng, kind, padding):
    """Return a random mask [B, Tq, Tk] as transformers makes them."""
    batch, tokens, size = rng.integers(1, 4), int(rng.integers(1, 24)), int(rng.integers(1, 9))
    i, j = np.arange(tokens)[:, None], np.arange(tokens)[None]
    mask = np.broadcast_to(KINDS[kind](i, j, size), (batch, tokens, tokens)).copy()
    for row in mask:
        missing = int(rng.integers(0, tokens))
        if padding == "left" and kind == "chunks":  # chunks start at the first real token
            row[missing:, missing:] = row[: tokens - missing, : tokens - missing].copy()
        row[:, slice(0, missing) if padding == "left" else slice(tokens - missing, None)] &= (
            padding == "none"
        )
    if padding != "right" and rng.random() < 0.5:
        mask = mask[:, int(rng.integers(0, tokens)) :]
    return np.pad(mask, ((0, 0), (0, 0), (0, int(rng.integers(0, 2)) * 5)))


def shown(reading, shape):
    """Return the mask that a reading describes, according to `jattn.spec`."""
    found = np.zeros(shape, bool)
    causal = np.broadcast_to(reading.is_causal, reading.seq_lens.shape)
    for r, seq_len in enumerate(reading.seq_lens):
        b, first, end = reading.documents[reading.document[r]]
        columns = np.flatnonzero(reading.kept[b])[first:end][:seq_len]
        tokens = reading.tokens[slice(*reading.query_start_loc[r : r + 2])]
        queries = np.arange(seq_len - len(tokens), seq_len)[:, None]
        sight = spec.Sight(bool(causal[r]), reading.sliding_window, reading.attention_chunk_size)
        seen = spec.visible(queries, np.arange(seq_len)[None], seq_len, sight)
        assert (tokens // shape[1] == b).all()
        found[b, (tokens % shape[1])[:, None], columns] = seen
    return found


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reading_shows_what_the_mask_shows(kind, padding):
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        mask = draw(rng, kind, padding)
        try:
            reading = masks.read_mask(mask)
        except jattn.UnsupportedError:  # documents that share too many keys
            refused += 1
            continue
        np.testing.assert_array_equal(shown(reading, mask.shape), mask)
    assert refused <= (6 if (kind, padding) == ("window", "right") else 0)


@pytest.mark.parametrize("kind", CACHED)
def test_readings_of_parts_show_what_their_masks_show(kind):
    """With a cache, parts come after padding, and the keys of earlier parts are already stored."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        tokens, size = int(rng.integers(8, 24)), int(rng.integers(2, 9))
        i, j = np.arange(tokens)[:, None], np.arange(tokens)[None]
        mask = np.broadcast_to(CACHED[kind](i, j, size), (3, tokens, tokens)).copy()
        # The first part has the whole prefix or picture, and a real token of every row.
        ends = sorted({8, *rng.integers(8, tokens + 1, 2).tolist(), tokens - 1, tokens} - {7})
        for row in mask[1:]:
            missing = int(rng.integers(0, 4 if kind == "picture in a window" else 8))
            if kind == "chunks":  # chunks start at the first real token
                row[missing:, missing:] = row[: tokens - missing, : tokens - missing].copy()
            row[:, :missing] = False
        kept = np.zeros((3, 0), bool)
        for start, end in itertools.pairwise([0, *ends]):
            part = mask[:, start:end, :end]
            kept = np.append(kept, part[:, :, start:].any(axis=1), axis=1)
            reading = masks.read_mask(part, kept)
            np.testing.assert_array_equal(shown(reading, part.shape), part)
            assert not reading.documents[:, 1].any()
            np.testing.assert_array_equal(reading.documents[:, 2], kept.sum(axis=1))


def test_stored_keys_are_kept():
    """A decode step behind a window still has all stored keys; padding is not among them."""
    kept = np.ones((2, 12), bool)
    kept[1, :4] = False
    mask = np.zeros((2, 1, 12), bool)
    mask[:, :, -3:] = True
    reading = masks.read_mask(mask, kept)
    assert reading.seq_lens.tolist() == [12, 8]
    assert reading.sliding_window == 3
    mask[1, :, 3] = True
    words = "hidden from all queries when they were written"
    with pytest.raises(jattn.UnsupportedError, match=words):
        masks.read_mask(mask, kept)


@pytest.mark.parametrize(
    ("hidden", "reason"),
    [
        (lambda i, j: (i == 5) & (j == 2), "query 5 of batch row 0 only 5 of the 6 keys"),
        (lambda i, j: j < i // 2, "neither all keys before an end, nor a window"),
    ],
)
def test_other_masks_are_refused(hidden, reason):
    i, j = np.arange(40)[:, None], np.arange(40)[None]
    mask = np.broadcast_to((j <= i) & ~hidden(i, j), (2, 40, 40))
    with pytest.raises(jattn.UnsupportedError, match=reason):
        masks.read_mask(mask)


def test_distances_are_those_of_keys_and_queries():
    mask = np.tril(np.ones((2, 6, 6), bool))
    mask[0, :, :2] = False
    distances, where, of_entry = masks.relative_columns(masks.read_mask(mask), mask)
    i, j = np.arange(6)[:, None], np.arange(6)[None]
    assert (of_entry >= 0).tolist() == mask.tolist()
    np.testing.assert_array_equal(
        distances[of_entry][mask], np.broadcast_to(j - i, mask.shape)[mask]
    )
    np.testing.assert_array_equal(of_entry.reshape(-1)[where], np.arange(len(distances)))


@pytest.mark.extended
def test_a_missing_host_is_named():
    """This runs in a new process, because this one may have imported torch."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import jattn.integrations.transformers as t\n"
        "for use in (t.register, lambda: t.PagedCache):\n"
        "    try: use()\n"
        "    except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    wanted = "jattn.integrations.transformers needs torch: pip install 'jattn[transformers]'"
    assert done.stdout.splitlines() == [wanted] * 2, done.stderr


def test_an_old_host_is_refused(monkeypatch):
    """Its version is checked before anything is imported; the extra has the same lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    oldest = ".".join(map(str, host.OLDEST))
    assert f"transformers>={oldest}" in extras["transformers"]
    monkeypatch.setattr(importlib.metadata, "version", {"transformers": "4.57.3"}.__getitem__)
    wanted = (
        f"jattn.integrations.transformers needs transformers {oldest} or newer, got 4.57.3: "
        "pip install 'jattn[transformers]'"
    )
    for use in (host.register, lambda: host.PagedCache):
        with pytest.raises(ImportError, match=re.escape(wanted)):
            use()
