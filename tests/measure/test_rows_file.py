"""The file of rows when processes are killed, disks fill up, and two write at once."""

import io
import json
import os
import random
import resource
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace

import pytest
from fakes import Fake, FakeRandom

from numattn.measure import read_rows, sweep, synthetic
from numattn.measure import rows as rows_module
from numattn.measure.rows import RowsError, Store, claim

X = synthetic("gaussian", 16, heads=2, head_dim=8)
Y = replace(synthetic("sink", 16, heads=2, head_dim=8), is_causal=True)
fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are forked")
lock = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fcntl")


@dataclass(frozen=True)
class Slow(Fake):
    """Takes its time, so that it can be killed."""

    info = replace(Fake.info, name="slow")

    def __call__(self, *args, **call):
        time.sleep(0.004)
        return super().__call__(*args, **call)


def run(out, methods=(Slow, FakeRandom), budgets=(2, 3, 4, 5), **options):
    call = {"seeds": 2, "timing": False, "progress": lambda p: None, **options}
    return sweep(methods, budgets, [X, Y], out=out, **call)


def child(work):
    """The id of a process that does this and nothing else."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def plain(rows):
    return [asdict(row) for row in rows]


class Crawling(io.FileIO):
    """A file that takes 100 bytes at a time, so that a kill leaves lines torn."""

    def write(self, data):
        time.sleep(0.0005)
        return super().write(bytes(data[:100]))


# --- killed ---------------------------------------------------------------------------------


@fork
def test_a_sweep_that_is_killed_again_and_again_has_the_rows_of_one_that_is_not(tmp_path):
    path = tmp_path / "rows.jsonl"
    want = run(tmp_path / "whole.jsonl")
    whole = (tmp_path / "whole.jsonl").read_bytes()
    chance = random.Random(0)
    torn = kills = 0

    def work():
        slow = {"ab": lambda name, mode, **k: Crawling(name, mode)}
        rows_module.open = lambda name, mode, **k: slow.get(mode, open)(name, mode, **k)
        run(path)

    for _ in range(60):
        pid = child(work)
        time.sleep(chance.uniform(0.02, 0.25))
        os.kill(pid, signal.SIGKILL)
        if status(pid) == 0:
            break
        kills += 1
        data = path.read_bytes() if path.exists() else b""
        assert whole.startswith(data)  # nothing is lost, doubled or out of order, torn or not
        torn += not data.endswith(b"\n") and bool(data)
    assert kills >= 5
    assert torn >= 1
    assert plain(run(path)) == plain(want)
    assert path.read_bytes() == whole
    assert not list(tmp_path.glob("*.lock"))


# --- two writers ----------------------------------------------------------------------------


@lock
def test_a_second_sweep_stops_before_it_does_anything_and_names_the_first(tmp_path):
    path = tmp_path / "rows.jsonl"
    run(path, budgets=[2])
    before = path.read_bytes()
    told = []
    with claim(path), pytest.raises(RowsError, match=rf"written by process {os.getpid()} on "):
        run(path, progress=told.append)
    assert told == []
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]
    assert len(run(path)) > 0


@lock
@fork
def test_the_claim_is_another_process_s_until_it_is_killed(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    ready, go = os.pipe()

    def work():
        with claim(path):
            os.write(go, b"x")
            time.sleep(60)

    pid = child(work)
    os.read(ready, 1)
    try:
        for _ in range(2):
            with pytest.raises(RowsError, match=rf"process {pid} on "), claim(path):
                pass
    finally:
        os.kill(pid, signal.SIGKILL)
        assert status(pid) == -signal.SIGKILL
    assert path.with_name("rows.jsonl.lock").exists()  # which locks nothing
    with claim(path):
        pass
    assert list(path.parent.iterdir()) == []


@lock
@fork
def test_many_who_want_it_at_once_have_it_one_at_a_time(tmp_path):
    path = tmp_path / "rows.jsonl"

    def work():
        done = 0
        while done < 20:
            try:
                with claim(path):
                    inside = os.open(tmp_path / "inside", os.O_CREAT | os.O_EXCL)
                    os.close(inside)
                    os.unlink(tmp_path / "inside")
                    done += 1
            except RowsError:
                time.sleep(0.0005)

    pids = [child(work) for _ in range(4)]
    assert [status(pid) for pid in pids] == [0] * 4


@lock
def test_a_lock_on_a_file_that_was_just_removed_is_no_claim(tmp_path, monkeypatch):
    import fcntl

    path, take = tmp_path / "rows.jsonl", fcntl.flock
    removed = []

    def late(file, how):
        if not removed:  # the one before ends between our opening and our locking
            removed.append(path.with_name("rows.jsonl.lock").unlink())
        take(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with claim(path):
        assert removed
        with pytest.raises(RowsError, match="is being written by"), claim(path):
            pass


@lock
def test_reading_needs_no_claim(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = run(path, budgets=[2])
    with claim(path):
        assert read_rows(path) == rows


# --- no room --------------------------------------------------------------------------------


def units(path):
    """Rows of one unit each, as a sweep writes them."""
    run(path)
    return list(Store(path, print).blocks.values())


class Full(io.FileIO):
    """A file on a disk with room for so many bytes."""

    room = 0

    def write(self, data):
        taken = bytes(data[: type(self).room])
        type(self).room -= len(taken)
        if not taken:
            raise OSError(28, "No space left on device")
        return super().write(taken)


@pytest.mark.parametrize("room", [0, 1, 700, 2500])
def test_a_disk_that_fills_up_leaves_whole_units_and_a_message(tmp_path, monkeypatch, room):
    blocks = units(tmp_path / "whole.jsonl")
    path = tmp_path / "rows.jsonl"
    store = Store(path, print)
    store.add(blocks[0])
    before = path.read_bytes()
    monkeypatch.setattr(Full, "room", room)
    monkeypatch.setattr(rows_module, "open", lambda n, m, **k: Full(n, m), raising=False)
    assert len("".join(json.dumps(asdict(row)) for row in blocks[1])) > room
    message = r"rows\.jsonl cannot be written: No space left on device. The 1 units"
    with pytest.raises(RowsError, match=message):
        store.add(blocks[1])
    assert path.read_bytes() == before
    assert list(store.blocks.values()) == blocks[:1]  # it does not count as done
    monkeypatch.undo()
    store.add(blocks[1])
    assert list(Store(path, print).blocks.values()) == blocks[:2]


def test_a_disk_that_fails_to_sync_or_to_cut_leaves_a_torn_end_that_is_cut_later(
    tmp_path, monkeypatch
):
    blocks = units(tmp_path / "whole.jsonl")
    path = tmp_path / "rows.jsonl"
    store = Store(path, print)
    store.add(blocks[0])
    before = path.read_bytes()

    class Stuck(Full):
        room = 700

        def truncate(self, size=None):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(rows_module, "open", lambda n, m, **k: Stuck(n, m), raising=False)
    with pytest.raises(RowsError, match="cannot be written"):
        store.add(blocks[1])
    monkeypatch.undo()
    torn = path.read_bytes()
    assert torn.startswith(before)
    assert len(torn) == len(before) + 700
    notes = []
    assert list(Store(path, notes.append).blocks.values()) == blocks[:1]
    assert "ends in the middle" in notes[0]
    store.add(blocks[1])  # the same store, when the disk works again
    assert list(Store(path, print).blocks.values()) == blocks[:2]


@fork
def test_a_sweep_at_a_real_limit_of_the_system_stops_with_the_message_and_goes_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    want = run(tmp_path / "whole.jsonl")
    whole = (tmp_path / "whole.jsonl").read_bytes()

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, resource.RLIM_INFINITY))
        with pytest.raises(RowsError, match="cannot be written: File too large"):
            run(path)

    assert status(child(work)) == 0
    data = path.read_bytes()
    assert 0 < len(data) <= len(whole) // 2
    assert whole.startswith(data)
    read_rows(path)  # whole units only: no warning, no error
    assert plain(run(path)) == plain(want)
    assert path.read_bytes() == whole
