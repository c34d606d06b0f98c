"""The benchmarks run; what they measure is not tested."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(ROOT.glob("benchmarks/*.py"))
METHODS = {
    "compress_layer": ("tucker", "tt"),
    "convert_model": (),
    "decode_latent": ("absorbed", "naive"),
    "decode_tensor": ("factored", "formed"),
    "train_gma": ("linear", "gma"),
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_smoke(script):
    if script.stem == "memory" and not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of resident memory is read from /proc")
    methods = METHODS.get(script.stem, ("linear", "topk"))
    call = [sys.executable, str(script), "--smoke", *methods]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for method in methods:
        assert any(line.startswith(method) for line in done.stdout.splitlines())
