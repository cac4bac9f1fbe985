# SPDX-License-Identifier: Apache-2.0
"""The disk tier: what was saved is there after any end, within its cap, and nothing damaged is believed."""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from radixkv.cache.block_run import BlockRun
from radixkv.cache.keys import encode_tokens
from radixkv.errors import ConfigError
from radixkv.tiers.disk.disk_tier import DiskTier
from radixkv.tiers.record import BlockKind
from radixkv.tiers.tier import TierState
from tests.support.waiting import until

BLOCK_BYTES = 512
KIND = BlockKind("m" * 32, "float32 1x1x8x8", 8, BLOCK_BYTES)
CAP = 1 << 20


def run_of(text: int, count: int, namespace: tuple[str, ...] = ("", "", "", "m")) -> BlockRun:
    tokens = [text * 1000 + i for i in range(8 * count)]
    return BlockRun(namespace, False, encode_tokens(tokens), 0, tuple(b"%d" % i for i in range(count)))


def data_of(run: BlockRun) -> np.ndarray:
    """What a block holds is made of its tokens, so that a wrong one shows."""
    size = 4 * run.block_size
    seeds = [run.tokens[4 * run.start :][i * size : (i + 1) * size] for i in range(len(run))]
    return np.stack([np.frombuffer((seed * 16)[:BLOCK_BYTES], np.uint8) for seed in seeds])


def saved(folder: Path, *runs: BlockRun, max_bytes: int = CAP, **options) -> None:
    tier = DiskTier(folder, max_bytes, KIND, **options)
    for run in runs:
        tier.save(run, data_of(run))
    tier.close()


def loaded(tier: DiskTier, run: BlockRun) -> int:
    """How many leading blocks come, all of them right."""
    _, count = tier.lookup(run)
    pieces = tier.load(run.part(0, count)).result(60)
    rows = [row for kept, data in pieces for row in data]
    assert all(run.is_same_text(kept, kept.end) for kept, _ in pieces)
    assert [bytes(row) for row in rows] == [bytes(row) for row in data_of(run)[: len(rows)]]
    return len(rows)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


def test_what_was_saved_is_there_after_a_restart(tmp_path):
    folder = tmp_path / "a" / "kv"
    saved(folder, run_of(1, 5), run_of(2, 3))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    tier = DiskTier(folder, CAP, KIND)
    assert [loaded(tier, run_of(text, 6)) for text in (1, 2, 3)] == [5, 3, 0]
    assert tier.lookup(run_of(3, 2)) == (TierState.MISS, 0)
    part = run_of(1, 5).part(2, 5)
    assert loaded(tier, run_of(1, 5)) == 5
    assert tier.lookup(part) == (TierState.HIT, 3)
    tier.close()
    tier.close()


def test_another_namespace_or_kind_finds_nothing(tmp_path):
    saved(tmp_path, run_of(1, 5))
    tier = DiskTier(tmp_path, CAP, KIND)
    assert loaded(tier, run_of(1, 5, ("eve", "", "", "m"))) == 0
    tier.close()
    tier = DiskTier(tmp_path, CAP, BlockKind("n" * 32, "float32 1x1x8x8", 8, BLOCK_BYTES))
    assert loaded(tier, run_of(1, 5)) == 0
    tier.close()


def test_only_what_is_missing_is_wanted_and_written(tmp_path):
    tier = DiskTier(tmp_path, CAP, KIND)
    run = run_of(1, 6)
    assert tier.wants(run) == range(6)
    tier.save(run.part(0, 3), data_of(run.part(0, 3)))
    assert tier.wants(run) == range(3, 6)
    tier.save(run, data_of(run))
    tier.close()
    assert tier.counts.written == 6
    tier = DiskTier(tmp_path, CAP, KIND)
    assert tier.wants(run) == range(0)
    tier.close()


def test_what_the_queue_has_no_room_for_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("radixkv.tiers.queued_bytes.MAX_QUEUED_BYTES", 3 * BLOCK_BYTES)
    tier = DiskTier(tmp_path, CAP, KIND)
    assert tier.wants(run_of(1, 6)) == range(3)
    tier.close()


def test_the_cap_holds_and_what_is_used_stays(tmp_path):
    """Also across restarts: the order of writing and of use is on the disk."""
    cap = 200 * 700
    favourite = run_of(9999, 6)
    saved(tmp_path, favourite, max_bytes=cap)
    for text in range(1, 120):
        tier = DiskTier(tmp_path, cap, KIND)
        assert loaded(tier, favourite) == 6, text
        run = run_of(text, 7)
        tier.save(run, data_of(run))
        tier.close()
        assert sum(path.stat().st_size for path in tmp_path.glob("*.*")) <= cap
    tier = DiskTier(tmp_path, cap, KIND)
    found = [loaded(tier, run_of(text, 7)) for text in range(1, 120)]
    assert found[-10:] == [7] * 10
    assert found[:50] == [0] * 50
    assert sum(found) > 119 * 7 * 0.1
    tier.close()


@pytest.mark.parametrize("survivors", [(1, 4), (2, 3, 7)])
def test_the_order_of_use_survives_a_restart(tmp_path, survivors):
    """What was used before it goes last after it, whatever was written first."""
    max_bytes, texts = 100_000, range(1, 13)
    saved(tmp_path, *(run_of(text, 5) for text in texts), max_bytes=max_bytes)
    tier = DiskTier(tmp_path, max_bytes, KIND)
    assert all(tier.lookup(run_of(text, 5))[1] == 5 for text in texts)
    for text in survivors:
        assert loaded(tier, run_of(text, 5)) == 5
    tier.close()
    tier = DiskTier(tmp_path, max_bytes, KIND)  # only the folder knows
    order = [*(text for text in texts if text not in survivors), *survivors]
    counts = set()
    for text in range(20, 60):
        tier.save(run_of(text, 5), data_of(run_of(text, 5)))
        tier.flush(60)
        there = {text for text in texts if tier.lookup(run_of(text, 5))[1]}
        assert there == set(order[len(order) - len(there) :])
        counts.add(len(there))
    assert len(counts) > 4
    tier.close()


def texts_in(folder: Path, max_bytes: int, texts: range) -> list[int]:
    """Those whose beginning is there."""
    tier = DiskTier(folder, max_bytes, KIND)
    there = [text for text in texts if tier.lookup(run_of(text, 5))[1]]
    tier.close()
    return there


@pytest.mark.parametrize("seed", range(4))
def test_what_was_used_longest_ago_goes_first(tmp_path, seed):
    """Wherever it was used: in the pool, or loaded. Also if only a smaller cap takes effect at the start."""
    rng = random.Random(seed)
    texts = range(20)
    saved(tmp_path, *(run_of(text, 5) for text in texts))
    order = list(texts)
    tier = DiskTier(tmp_path, CAP, KIND)
    for text in rng.choices(texts, k=15):
        if rng.random() < 0.5:
            tier.touch(run_of(text, 5))
        else:
            loaded(tier, run_of(text, 5))
        order.remove(text)
        order.append(text)
    tier.close()
    cap = 65 * 800
    there = texts_in(tmp_path, cap, texts)
    assert len(there) > 5
    assert sorted(there) == sorted(order[-len(there) :])


def test_of_one_text_the_end_goes_first(tmp_path):
    cap = 65 * 800
    saved(tmp_path, run_of(1, 60), max_bytes=cap)
    saved(tmp_path, run_of(2, 40), max_bytes=cap)
    tier = DiskTier(tmp_path, cap, KIND)
    assert 20 < tier.lookup(run_of(1, 60))[1] < 45
    assert tier.lookup(run_of(2, 40))[1] == 40
    tier.close()


def test_what_was_used_just_before_a_kill_is_known(tmp_path):
    """The order of use is written down soon, also when nothing else is written."""
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = ['tests/tiers'];"
        "from test_disk_tier import CAP, KIND, DiskTier, run_of;"
        f"tier = DiskTier(Path({str(tmp_path)!r}), CAP, KIND); print('open', flush=True);"
        "tier.touch(run_of(int(sys.stdin.readline()), 5)); sys.stdin.read()"
    )
    saved(tmp_path, *(run_of(text, 5) for text in range(20)))
    uses = tmp_path / "00000001.used"
    before, pipe = uses.read_bytes(), subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == b"open\n"
        process.stdin.write(b"3\n")
        process.stdin.flush()
        until(lambda: uses.read_bytes() != before)
        process.kill()
    assert 3 in texts_in(tmp_path, 65 * 800, range(20))


def test_a_smaller_cap_takes_hold_at_the_start(tmp_path):
    saved(tmp_path, *(run_of(text, 10) for text in range(1, 60)))
    saved(tmp_path, max_bytes=100 * 700)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.*")) <= 100 * 700


def test_a_cap_that_is_too_small_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="give it room for 64 at least, max="):
        DiskTier(tmp_path, 1000, KIND)


class TestOneFolder:
    def test_a_second_tier_is_told(self, tmp_path):
        tier = DiskTier(tmp_path, CAP, KIND)
        told = f"^the K/V tier's folder {tmp_path} is in use by process {os.getpid()}; .* other one first$"
        with pytest.raises(ConfigError, match=told):
            DiskTier(tmp_path, CAP, KIND)
        tier.close()
        DiskTier(tmp_path, CAP, KIND).close()

    def test_a_second_process_is_told_until_the_first_is_killed(self, tmp_path):
        code = (
            "import sys; from pathlib import Path; from radixkv.tiers.disk.folder import FolderLock;"
            f"lock = FolderLock(Path({str(tmp_path)!r})); print('locked', flush=True); sys.stdin.read()"
        )
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
            assert process.stdout.readline() == b"locked\n"
            with pytest.raises(ConfigError, match=f"in use by process {process.pid}; give each server"):
                DiskTier(tmp_path, CAP, KIND)
            process.kill()
        DiskTier(tmp_path, CAP, KIND).close()

    def test_a_folder_that_is_none_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("text")
        with pytest.raises(ConfigError, match="give a folder that can be written"):
            DiskTier(tmp_path / "file", CAP, KIND)

    def test_others_files_are_left_alone(self, tmp_path):
        (tmp_path / "notes.txt").write_text("text")
        (tmp_path / "00000009.used").write_bytes(b"\1")
        saved(tmp_path, run_of(1, 5))
        assert (tmp_path / "notes.txt").read_text() == "text"
        assert not (tmp_path / "00000009.used").exists()


class Failing:
    """The system's calls, of which one kind fails from some call on."""

    def __init__(self, call: str, error: int, after: int = 0) -> None:
        self.call, self.error, self.after = call, error, after

    def __getattr__(self, name: str):
        real = getattr(os, name)
        if name != self.call:
            return real

        def fail(*args, **options):
            self.after -= 1
            if self.after < 0:
                raise OSError(self.error, os.strerror(self.error))
            return real(*args, **options)

        return fail


@pytest.mark.parametrize(
    ("call", "error", "after"),
    [("pwritev", errno.ENOSPC, 3), ("fdatasync", errno.EIO, 0), ("fsync", errno.EIO, 0)],
)
def test_a_disk_that_fails_turns_the_tier_off(tmp_path, caplog, call, error, after):
    tier = DiskTier(tmp_path, CAP, KIND, system=Failing(call, error, after))
    for text in range(1, 5):
        tier.save(run_of(text, 5), data_of(run_of(text, 5)))
    tier.close()
    assert tier.failure.errno == error
    assert tier.lookup(run_of(1, 5)) == (TierState.MISS, 0)
    assert tier.wants(run_of(9, 5)) == range(0)
    tier.save(run_of(9, 5), data_of(run_of(9, 5)))
    assert len([record for record in caplog.records if "off from now on" in record.message]) == 1
    tier = DiskTier(tmp_path, CAP, KIND)  # what was written before is there, if it is whole
    assert loaded(tier, run_of(1, 5)) in range(6)
    tier.close()


def test_a_disk_that_can_not_be_read_turns_the_tier_off(tmp_path):
    saved(tmp_path, run_of(1, 5))
    tier = DiskTier(tmp_path, CAP, KIND, system=Failing("preadv", errno.EIO, 3))
    assert tier.load(run_of(1, 5)).result(60)[0].run.end == 16
    assert tier.failure is not None
    assert tier.lookup(run_of(1, 5)) == (TierState.MISS, 0)
    tier.close()


def test_files_that_somebody_removes_are_missed_and_no_more(tmp_path):
    saved(tmp_path, run_of(1, 5))
    tier = DiskTier(tmp_path, CAP, KIND)
    for path in segments(tmp_path):
        path.unlink()
    assert loaded(tier, run_of(1, 5)) == 0
    assert tier.failure is None
    assert tier.wants(run_of(1, 5)).start == 0
    tier.close()


def test_bits_that_flip_and_ends_that_are_cut_off(tmp_path):
    """RADIXKV_DAMAGES: how many; each is found, counted and dropped, and nothing wrong is given."""
    rng = random.Random(7)
    runs = [run_of(text, 5) for text in range(1, 5)]
    saved(tmp_path, *runs)
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    record = len(whole) // 20
    for case in range(int(os.environ.get("RADIXKV_DAMAGES", "300"))):
        damaged = bytearray(whole)
        if case % 4:
            bit = rng.randrange(len(whole) * 8)
            damaged[bit // 8] ^= 1 << bit % 8
            place = bit // 8 // record
        else:
            cut = rng.randrange(len(whole))
            damaged, place = damaged[:cut], cut // record
        in_header = case % 4 == 0 or bit // 8 % record < 96
        path.write_bytes(damaged)
        tier = DiskTier(tmp_path, CAP, KIND)
        found = sum(loaded(tier, run) for run in runs)
        # After a bad header nothing more of the file is made out.
        assert place // 5 * 5 <= found
        if in_header:
            assert found == place
        else:
            assert found == 20 - (5 - place % 5)
        is_whole = case % 4 == 0 and len(damaged) % record == 0
        assert tier.counts.damaged == (not is_whole)
        again = tier.wants(runs[min(place, 19) // 5])
        assert (is_whole and not len(damaged)) or again.start == place % 5
        tier.close()
        assert segments(tmp_path) in ([path], [])


@pytest.mark.parametrize("start", [b"radixkv\x01\x02\0\0\0", b"radixkv\x02\x09\0\0\0"])
def test_what_a_later_version_wrote_in_its_own_way_is_no_damage(tmp_path, caplog, start):
    """Of its header only the beginning is known."""
    caplog.set_level("INFO", "radixkv")
    theirs = tmp_path / "00000003.seg"
    theirs.write_bytes(start + random.Random(4).randbytes(5000))
    content = theirs.read_bytes()
    for _ in range(2):
        saved(tmp_path, run_of(3, 5))
        tier = DiskTier(tmp_path, CAP, KIND)
        assert loaded(tier, run_of(3, 5)) == 5
        assert tier.counts.damaged == 0
        tier.close()
        assert theirs.read_bytes() == content
    assert "of another version of the format" in caplog.text


def test_a_damaged_version_is_damage(tmp_path):
    saved(tmp_path, run_of(1, 3))
    (path,) = segments(tmp_path)
    for place in (7, 8, 9, 11):
        content = bytearray(path.read_bytes())
        content[place] ^= 4
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / path.name).write_bytes(content)
        tier = DiskTier(tmp_path / "other", CAP, KIND)
        assert tier.counts.damaged == 1
        assert tier.lookup(run_of(1, 3)) == (TierState.MISS, 0)
        tier.close()


def test_the_models_name_is_no_part_of_a_blocks_name(tmp_path):
    saved(tmp_path, run_of(1, 3))
    tier = DiskTier(tmp_path, CAP, replace(KIND, model_name="what people call it"))
    assert loaded(tier, run_of(1, 3)) == 3
    tier.close()


def test_what_another_version_wrote_stays_until_its_room_is_needed(tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as other_version:
        other_version.setattr("radixkv.tiers.record.FORMAT_VERSION", 7)
        saved(tmp_path, run_of(1, 9), run_of(2, 4))
    theirs = {path: path.read_bytes() for path in segments(tmp_path)}
    caplog.set_level("INFO", "radixkv")
    for _ in range(2):
        saved(tmp_path, run_of(3, 5))
        tier = DiskTier(tmp_path, CAP, KIND)
        assert loaded(tier, run_of(3, 5)) == 5
        assert tier.lookup(run_of(1, 9)) == (TierState.MISS, 0)
        assert tier.counts.damaged == 0
        tier.close()
        assert {path: path.read_bytes() for path in theirs} == theirs
    assert "of another version of the format" in caplog.text
    tier = DiskTier(tmp_path, 100 * 1024, KIND)
    for text in range(10, 60):
        tier.save(run_of(text, 8), data_of(run_of(text, 8)))
        tier.flush(60)
    tier.close()
    assert not any(path.exists() for path in theirs)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 101 * 1024
