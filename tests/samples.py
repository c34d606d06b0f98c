"""Rows that nothing measured, to make tables, pictures and pages of."""

from numattn.measure.rows import Row

ROW = Row(
    method="fake",
    family="sparse",
    options={"parts": 16, "kind": "a|b"},
    budget=16,
    budget_option="parts",
    units=16,
    is_oracle=False,
    approximates="softmax",
    fitted=False,
    random=False,
    input="first",
    tag="diffuse",
    digest="0",
    length=64,
    is_causal=True,
    heads=1,
    head=0,
    seed=0,
    dtype="float32",
    device="cpu",
    backend="torch",
    output=0.1,
    machine="machine",
    numattn_version="0",
    torch_version="1",
    python_version="2",
)
