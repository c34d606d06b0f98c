"""Sweeps that processes share."""

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from fakes import Fake, FakeFailing, FakeRandom, FakeRefusing

from numattn.cli import main
from numattn.measure import read_rows, sweep, synthetic
from numattn.measure.ranks import Team
from numattn.measure.rows import RowsError

MODULE = sys.modules["numattn.measure.sweep"]
X = synthetic("gaussian", 16, heads=2, head_dim=8)
Y = replace(synthetic("sink", 16, heads=2, head_dim=8), is_causal=True)

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available() and hasattr(os, "fork")),
    reason="needs torch.distributed with gloo, and fork",
)

MEASURE = """
measure window nystrom performer --budget 4 8 --seeds 2 --no-timing --threads 1
--input gaussian smollm2-local --length 32 --mode prefill decode
"""


def command(out):
    return [*MEASURE.split(), "--out", str(out)]


def lines(path):
    read_rows(path)  # all units are whole
    return sorted(path.read_bytes().splitlines())


def test_two_processes_of_torchrun_leave_the_rows_of_one(tmp_path, capsys):
    one, two = (tmp_path / name / "rows.jsonl" for name in ("one", "two"))
    assert main(command(one.parent)) == 0
    alone = capsys.readouterr().out
    many = "-m torch.distributed.run --standalone --nproc-per-node 2 -m numattn"
    done = subprocess.run(
        [sys.executable, *many.split(), *command(two.parent)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1073741824"},  # does not start itself again
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert lines(one) == lines(two)
    assert done.stdout.count("Summary over") == alone.count("Summary over") > 0
    assert done.stdout.count("Written:") == 1  # only the leader reports
    assert done.stderr.count(" (0 of ") == 1


# --- teams without torchrun, which starts slowly ----------------------------------------------


def team(tmp_path, work, size=2):
    """What `work(team)` of forked processes puts into files, by rank, and how they ended."""
    path = Path(tempfile.mkdtemp(dir=tmp_path))
    pids = []
    for rank in range(size):
        pid = os.fork()
        pids.append(pid)
        if pid == 0:
            try:
                dist.init_process_group(
                    "gloo", f"file://{path / 'meet'}", rank=rank, world_size=size
                )
                said = work(Team.of_all())
                (path / str(rank)).write_text(str(said))
            finally:
                os._exit(0)
    ends = [os.waitpid(pid, 0)[1] for pid in pids]
    said = [(path / str(rank)).read_text() if (path / str(rank)).exists() else "" for rank in
            range(size)]  # fmt: skip
    return said, ends


def rows_of(methods, path, **options):
    call = {"timing": False, "progress": lambda p: None, **options}
    return sweep(methods, [2, 4, 8], [X, Y], 2, out=path, **call)


@pytest.mark.parametrize("seconds", [0, 10], ids=["many rounds", "one"])
@pytest.mark.parametrize("size", [2, 3])  # as many as there are inputs, and more
def test_any_number_of_processes_leave_the_rows_of_one(tmp_path, monkeypatch, size, seconds):
    monkeypatch.setattr(MODULE, "ROUND", seconds)
    methods = [Fake, FakeRandom, FakeRefusing, FakeFailing]
    want = rows_of(methods, tmp_path / "one.jsonl")
    path = tmp_path / "many.jsonl"
    said, _ = team(tmp_path, lambda t: len(rows_of(methods, path, team=t)), size)
    assert said == [str(len(want)), *["0"] * (size - 1)]  # the leader has the rows
    assert lines(path) == lines(tmp_path / "one.jsonl")
    assert rows_of(methods, path)[: len(want)] == want  # nothing but failures is done again


def test_all_processes_work(tmp_path):
    class Where(Fake):
        def __call__(self, *args, **call):
            (tmp_path / f"{os.getpid()}-{self.parts}").touch()
            return super().__call__(*args, **call)

    team(tmp_path, lambda t: rows_of([Where], tmp_path / "rows.jsonl", team=t))
    ran = [p.name.split("-") for p in tmp_path.glob("*-*")]
    assert len({pid for pid, _ in ran}) == 2
    assert len(ran) == 2 * 3  # an input each, at all budgets


def test_pieces_go_to_who_has_least_to_do():
    shares = [Team(rank, 3).share([5, 1, 9, 4, 4, 2], float) for rank in range(3)]
    assert shares == [[9], [5, 2, 1], [4, 4]]
    assert Team(0, 2).share([], float) == []


def test_what_stops_the_leader_stops_all(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"oops\n")

    def work(t):
        with pytest.raises(RowsError) as caught:
            rows_of([Fake], path, team=t)
        return caught.value

    said, _ = team(tmp_path, work)
    assert said[0] == said[1]
    assert "rows.jsonl, line 1 is not a row" in said[0]
    assert path.read_bytes() == b"oops\n"


def test_what_was_gathered_is_safe_when_a_process_dies(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    rows_of([Fake], tmp_path / "one.jsonl")

    monkeypatch.setattr(MODULE, "ROUND", 0)

    def work(t):
        def die(*args, **call):
            if not t.leads and call["parts"] == 8:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **call)

        original, Fake.function = Fake.function, staticmethod(die)
        with pytest.raises(RuntimeError):  # gloo: the connection was closed
            rows_of([Fake], path, team=t)
        return "told"

    said, ends = team(tmp_path, work)
    assert said == ["told", ""]
    assert os.waitstatus_to_exitcode(ends[1]) == -signal.SIGKILL
    whole = lines(tmp_path / "one.jsonl")
    safe = lines(path)
    assert set(safe) < set(whole)
    names = {row.input for row in read_rows(path)}
    assert names == {X.name, Y.name}  # the leader's, and those gathered of the other
    rows_of([Fake], path)
    assert lines(path) == whole


def test_a_process_alone_is_a_team():
    alone = Team.of_all()
    assert (alone.leads, alone.size) == (True, 1)
    assert alone.gather(3) == [3]
    assert alone.from_leader(lambda: 4) == 4
