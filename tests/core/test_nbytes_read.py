"""Bytes that a decoding step reads, counted by hand: a key and value are 8 + 5 numbers of 8."""

import pytest
import torch

import numattn
from numattn.testing import Subject, make_qkv

N, HEADS, KEY = 300, 2 * 3, (8 + 5) * 8
WHOLE = HEADS * N * KEY

DECODING = [m for m in numattn.methods() if m.info.decode]


def state(name, length=N, **options):
    method = numattn.get(name, **options)
    q, k, v = make_qkv(N)
    tensors = Subject(method).fit(q, k, v)
    return method.state(k[:, :, :length], v[:, :, :length], **tensors)


@pytest.mark.parametrize("record", DECODING, ids=lambda m: m.info.name)
@pytest.mark.parametrize("length", [0, 1, 40])
def test_no_step_reads_more_than_is_kept(record, length):
    kept = state(record.info.name, length)
    assert 0 <= kept.nbytes_read <= kept.nbytes


def test_exact_attention_reads_all():
    assert state("exact").nbytes_read == WHOLE


def test_topk_reads_every_key_and_the_values_it_keeps():
    assert state("topk", num_keys=30).nbytes_read == HEADS * (N * 8 + 30 * 5) * 8


def test_window_reads_what_it_keeps():
    kept = state("window", window=50, num_sinks=4)
    assert kept.nbytes_read == kept.nbytes == HEADS * 54 * KEY


@pytest.mark.parametrize(("name", "rounds"), [("lsh", 3), ("routing", 1)])
def test_buckets_read_labels_and_what_is_listed_at_most(name, rounds):
    options = {"lsh": {"bucket_size": 10, "num_rounds": 3}, "routing": {"cluster_size": 10}}
    kept = state(name, window=20, num_sinks=2, **options[name])
    labels = HEADS * N * rounds * 4
    assert kept.nbytes_read == HEADS * (rounds * 10 + 22) * KEY + labels


def test_bigbird_reads_the_blocks_of_the_last_position():
    kept = state("bigbird", block_size=16, num_window=2, num_global=1, num_random=0)
    last = N % 16  # tokens of the open block; then the block before, and the first
    assert kept.nbytes_read == HEADS * (last + 32) * KEY


@pytest.mark.parametrize("levels", [1, 2])
def test_multipole_reads_clusters_near_keys_and_the_open_block(levels):
    options = {"block_size": 64, "cluster_size": 16, "num_near": 20, "query_tile": 1}
    kept = state("multipole", levels=levels, **options)
    opened = 4 if levels == 1 else 2  # of four clustered blocks: ceil(4 * 20 / 64)
    cell = (1 + 8 + 5) * 8
    clusters = HEADS * (opened * 4 + (4 if levels == 2 else 0)) * cell
    assert kept.nbytes_read == HEADS * (20 + N - 256) * KEY + clusters


def test_a_step_that_was_appended_counts():
    kept = state("exact")
    _, k, v = make_qkv(1)
    kept.append(k, v)
    assert kept.nbytes_read == WHOLE + HEADS * KEY
    assert torch.is_tensor(kept.attend(k))
