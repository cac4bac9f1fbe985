# SPDX-License-Identifier: Apache-2.0
"""The cluster simulator: a replica by hand, several by their invariants, and the command."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nightly import by_day
from trace_tools import build, random_paths, traces_folder, write_hash_ids
from typer.testing import CliRunner

from benchmarks.cluster_simulator import simulated_replica as replica_module
from benchmarks.cluster_simulator.cluster_command import parse_replicas
from benchmarks.cluster_simulator.commands import app as simulator_app
from benchmarks.cluster_simulator.figures import figures_of, find_load, simulate_cluster
from benchmarks.cluster_simulator.routers import ROUTERS, RoundRobin
from benchmarks.cluster_simulator.simulated_replica import ReplicaConfig
from benchmarks.cluster_simulator.simulation import ClusterConfig, ClusterRun, ClusterSimulation
from benchmarks.cluster_simulator.step_cost import StepCost, fit, make_cost, read_cost
from benchmarks.fragmentation import save_small_model
from benchmarks.token_prompts import scaled, token_prompts
from radixkv.cli.options import parse_names
from radixkv.cli.replay.driver import replay
from radixkv.cli.replay.readers import ReadOptions, read_trace
from radixkv.cli.replay.trace import Trace, TraceBuilder
from radixkv.errors import ConfigError

COST = StepCost(step_s=0.01, token_s=0.001)
BLOCK = 16


def config(num_replicas: int = 1, num_blocks: int = 1000, **options: Any) -> ClusterConfig:
    cost = options.pop("cost", COST)
    return ClusterConfig(
        num_replicas, ReplicaConfig(num_blocks, BLOCK, **options.pop("replica", {})), cost, **options
    )


def run(trace: Trace, cluster: ClusterConfig, router: str = "round-robin") -> ClusterRun:
    return ClusterSimulation(trace, cluster, ROUTERS[router]).run()


def trace_of(requests: list[tuple[float, list[int], int]]) -> Trace:
    """Requests as (arrival, block ids, answer tokens)."""
    builder = TraceBuilder("by hand")
    for arrival, path, answer in requests:
        builder.add(path, input_length=len(path) * BLOCK, output_length=answer, arrival=arrival)
    return builder.build(BLOCK)


def test_one_request_takes_what_its_steps_cost() -> None:
    """A prompt of 32 tokens in one step, then three decodes."""
    done = run(trace_of([(5.0, [0, 1], 4)]), config())
    (request,) = done.requests
    assert request.arrival_s == 0.0, "time begins with the first arrival"
    assert request.ttft_s == pytest.approx(0.01 + 0.032)
    assert request.last_token_s == pytest.approx(0.042 + 3 * 0.011)
    assert done.gaps.tolist() == pytest.approx([0.011] * 3)
    assert done.busy_s == pytest.approx([request.last_token_s])


def test_a_prompt_is_chunked_by_the_token_budget() -> None:
    done = run(trace_of([(0.0, [0, 1, 2], 1)]), config(replica={"max_num_batched_tokens": 20}))
    assert done.requests[0].ttft_s == pytest.approx(3 * 0.01 + 48 * 0.001)
    assert done.steps == [3]


def test_a_cached_prefix_is_not_computed_again() -> None:
    """The second prompt shares two blocks of three; of the third, which is all there, a token is computed."""
    done = run(trace_of([(0.0, [0, 1, 2], 1), (10.0, [0, 1, 3], 1), (20.0, [0, 1, 3], 1)]), config())
    assert [request.cached_tokens for request in done.requests] == [0, 32, 47]
    assert [request.ttft_s for request in done.requests] == pytest.approx([0.058, 0.026, 0.011])


def test_a_request_waits_for_the_step_that_runs() -> None:
    """The second arrives within the first one's step, and is computed in the next."""
    done = run(trace_of([(0.0, [0, 1, 2, 3], 1), (0.05, [4], 1)]), config())
    assert done.requests[1].ttft_s == pytest.approx((0.074 - 0.05) + 0.026)


def test_a_request_that_never_fits_is_refused_and_harms_nobody() -> None:
    done = run(trace_of([(0.0, [0, 1, 2, 3], 8), (0.0, [4], 8)]), config(num_blocks=4))
    assert [request.refused for request in done.requests] == [True, False]
    assert math.isnan(done.requests[0].ttft_s)
    assert done.requests[1].ttft_s > 0


def test_answers_that_are_too_long_preempt_and_end() -> None:
    """Two answers outgrow a pool that holds one: both get all their tokens."""
    done = run(trace_of([(0.0, [0], 60), (0.0, [1], 60)]), config(num_blocks=6))
    assert done.preemptions > 0
    assert not any(request.refused for request in done.requests)
    assert len(done.gaps) == 2 * 59


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from(sorted(ROUTERS)), st.integers(12, 60))
def test_every_request_is_served_as_a_cache_would(seed: int, count: int, router: str, blocks: int) -> None:
    """Whatever routes: all end, in order of cause and effect, and nobody finds what nobody has computed."""
    rng = random.Random(seed)
    paths = random_paths(rng, requests=40)
    arrivals = np.cumsum([rng.expovariate(20.0) for _ in paths])
    trace = trace_of([(float(t), path, rng.randint(1, 40)) for t, path in zip(arrivals, paths, strict=True)])
    done = run(
        trace, config(count, blocks, replica={"max_num_batched_tokens": 64, "max_num_seqs": 4}), router
    )
    bound = replay(trace, "lru", None).hit_tokens
    assert sum(request.cached_tokens for request in done.requests) <= bound
    for request in done.requests:
        assert not request.refused
        assert 0 <= request.replica < count
        assert request.arrival_s < request.first_token_s <= request.last_token_s <= done.seconds + 1e-9
    assert len(done.gaps) == sum(request.answer_tokens - 1 for request in done.requests)
    assert max(done.busy_s) <= done.seconds + 1e-9


@pytest.mark.parametrize("router", by_day(sorted(ROUTERS), "expected-ttft"))
def test_steps_taken_at_once_change_nothing(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    paths = random_paths(rng, requests=60)
    trace = trace_of([(0.2 * i, path, rng.randint(1, 90)) for i, path in enumerate(paths)])
    cluster = config(2, 200, cost=StepCost(0.01, 0.001, 1e-4, 1e-6, 1e-7))
    ahead = run(trace, cluster, router)
    monkeypatch.setattr(replica_module, "_MAX_STEPS_AHEAD", 1)
    single = run(trace, cluster, router)
    assert [request.replica for request in ahead.requests] == [request.replica for request in single.requests]
    assert [request.cached_tokens for request in ahead.requests] == [
        request.cached_tokens for request in single.requests
    ]
    first = [request.ttft_s for request in single.requests]
    assert [request.ttft_s for request in ahead.requests] == pytest.approx(first, abs=2e-4)
    assert ahead.steps == single.steps


def test_one_replica_finds_what_replay_finds() -> None:
    """One request after another, the simulated replica's hits are the replayed cache's."""
    paths = random_paths(random.Random(3), requests=150, blocks=4, depth=5)
    trace = trace_of([(100.0 * i, path, 1) for i, path in enumerate(paths)])
    done = run(trace, config(num_blocks=1000))
    expected = replay(trace, "lru", None).hit_tokens
    full = sum(request.cached_tokens == request.prompt_tokens - 1 for request in done.requests)
    assert sum(request.cached_tokens for request in done.requests) + full == expected


def test_stale_events_lead_to_worse_routing() -> None:
    """A router that hears too late does not know where a prefix is."""
    trace = trace_of([(5.0 * i, [0, 1, 2, 3 + i], 1) for i in range(20)])
    fresh = run(trace, config(4), "longest-match")
    stale = run(trace, config(4, event_delay_s=1e6), "longest-match")
    assert len({request.replica for request in fresh.requests}) == 1
    assert len({request.replica for request in stale.requests}) == 4


def test_figures_of_a_run() -> None:
    trace = trace_of([(float(i), [0, 1, 2 + i], 3) for i in range(10)])
    cluster = config(2)
    done = run(trace, cluster)
    figures = figures_of(done, trace, "round-robin", cluster, limit_s=0.04, pooled=0.5)
    assert figures.requests_per_s == pytest.approx(10 / 9)
    assert figures.hit_rate == pytest.approx(8 * 32 / 480)
    assert figures.pooled_share == pytest.approx(2 * 8 * 32 / 480)
    assert figures.within_limit == pytest.approx(0.8), "the first of each replica computes everything"
    assert figures.busiest_over_mean == pytest.approx(1.0)
    assert 0 < figures.duplicated_blocks < 0.5
    assert figures.itl_p50_s == pytest.approx(0.011)


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.0, 400.0])
def test_the_load_is_found(limit: float) -> None:
    """Of a server whose TTFT is the speed, the load is the limit."""
    trace = build([[0]])
    base = simulate_cluster(trace, "x", RoundRobin, config(), 1.0, 0.0)

    def at(speed: float) -> Any:
        values = asdict(base) | {"within_limit": 1.0 if speed <= limit else 0.5, "speed": speed}
        return type(base)(**values)

    found = find_load(at, 1.0)
    assert found is not None
    assert limit / 1.03 < found.speed <= limit


def test_no_load_is_found_where_none_is_carried() -> None:
    trace = trace_of([(0.0, [0], 1)])
    figures = simulate_cluster(trace, "x", RoundRobin, config(), 1e-9, 0.0)
    assert find_load(lambda speed: figures, 1.0) is None


# ---------------------------------------------------------------------- what steps cost


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([0.0, 1e-6, 3e-5, 1e-4]), min_size=4, max_size=4), st.integers(0, 1000))
@example([1e-6, 1e-4, 0.0, 1e-4], 789)  # attention takes all the time, as far as one can see
def test_a_cost_is_fitted(factors: list[float], seed: int) -> None:
    """From steps with 2 % of noise it predicts steps that it has not seen."""
    rng = np.random.default_rng(seed)
    true = StepCost(0.005, *factors) if sum(factors) else StepCost(0.005, 1e-6)

    def steps(count: int) -> list[np.ndarray]:
        tokens, rows = rng.integers(1, 600, count), rng.integers(1, 16, count)
        context = rows * rng.integers(1, 2000, count)
        return [
            np.array([1.0, t + r, r, c, t * c / 2], dtype=float)
            for t, r, c in zip(tokens, rows, context, strict=True)
        ]

    seen = steps(200)
    found = fit(seen, [true.seconds(work) * float(rng.normal(1, 0.02)) for work in seen])
    new = steps(100)
    predicted = np.array([found.cost.seconds(work) for work in new])
    expected = np.array([true.seconds(work) for work in new])
    assert np.median(np.abs(predicted / expected - 1)) < 0.03
    assert found.median_error < 0.03
    assert all(value >= 0 for value in asdict(found.cost).values())


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        fit([np.ones(5)], [1.0])


@pytest.mark.parametrize(
    "text", ["", "{}", '{"cost": {"nonsense": 1}}', '{"cost": {"step_s": -1, "token_s": 1}}']
)
def test_a_file_that_is_no_cost_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="cost"):
        read_cost(str(path))


def test_a_cost_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"cost": asdict(COST), "fit": {}}), encoding="utf-8")
    assert read_cost(str(path)) == COST
    with pytest.raises(ConfigError, match="cluster_simulator fit"):
        read_cost(str(tmp_path / "none.json"))
    simple = make_cost("h100-8b", 1000.0, 0.02)
    assert (simple.step_s, simple.token_s) == (0.02, 0.001)


# ---------------------------------------------------------------------- the command


@pytest.fixture
def app() -> typer.Typer:
    return simulator_app


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    paths = random_paths(random.Random(4), requests=120, blocks=4, depth=6)
    return write_hash_ids(tmp_path / "small.jsonl", paths, 50)


@pytest.mark.nightly
def test_the_command_writes_table_json_and_plot(app: typer.Typer, trace_file: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = ["cluster", str(trace_file), "--replicas", "1,2", "--policy", "all"]
    arguments += ["--blocks", "100", "--prefill-rate", "2000", "--json", str(out), "--plot", str(plot)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [(row["num_replicas"], row["router"]) for row in rows] == [
        (count, name) for count in (1, 2) for name in ROUTERS
    ]
    alone = [row["ttft_p50_s"] for row in rows if row["num_replicas"] == 1]
    assert alone == pytest.approx([alone[0]] * len(ROUTERS)), "with one replica there is nothing to choose"
    assert plot.stat().st_size > 1000


@pytest.mark.nightly
def test_the_command_finds_loads(app: typer.Typer, trace_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["cluster", str(trace_file), "--replicas", "2", "--blocks", "60", "--find-load"]
    arguments += ["--prefill-rate", "3000", "--ttft-limit", "0.5", "--max-answer", "2", "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    first, second = json.loads(out.read_text())["rows"]
    assert first["within_limit"] >= 0.9
    assert second["requests_per_s"] >= first["requests_per_s"]


@pytest.mark.nightly
def test_the_command_says_where_no_load_is_carried(app: typer.Typer, trace_file: Path) -> None:
    arguments = ["cluster", str(trace_file), "--replicas", "2", "--blocks", "60", "--find-load"]
    arguments += ["--prefill-rate", "3000", "--ttft-limit", "0.00001", "--max-answer", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for name in ("round-robin", "expected-ttft"):
        assert f"2 x {name}: no row" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--policy", "nobody"], "nobody"),
        (["--replicas", "0"], "--replicas"),
        (["--cost", "nowhere.json"], "nowhere.json"),
    ],
)
def test_mistakes_are_named(app: typer.Typer, trace_file: Path, arguments: list[str], what: str) -> None:
    result = CliRunner().invoke(app, ["cluster", str(trace_file), *arguments])
    assert isinstance(result.exception, ConfigError)
    assert what in str(result.exception)


def test_lists_are_parsed() -> None:
    assert parse_replicas("1, 2,2") == [1, 2]
    assert parse_names("--policy", "all", ROUTERS) == list(ROUTERS)


@pytest.mark.nightly
def test_a_recorded_trace_carries_more_when_routed_by_what_replicas_hold() -> None:
    """The beginning of a production trace on eight replicas: more hits, and first tokens sooner."""
    trace = read_trace(traces_folder() / "mooncake_conversation.jsonl.gz", ReadOptions(limit=1200))
    replica = ReplicaConfig(12_000, trace.block_size)
    cluster = ClusterConfig(8, replica, make_cost("h100-8b", 8000.0, None), max_answer_tokens=1)
    plain, routed = (
        figures_of(run(trace, cluster, name), trace, name, cluster, 5.0, 0.0)
        for name in ("round-robin", "expected-ttft")
    )
    assert routed.hit_rate > 1.5 * plain.hit_rate
    assert routed.ttft_p90_s < 0.8 * plain.ttft_p90_s


@pytest.mark.nightly
def test_steps_are_measured_and_the_simulation_is_checked(app: typer.Typer, tmp_path: Path) -> None:
    """On a toy model: what was fitted is read back, and prefixes are found as predicted."""
    model, out, trace_file = tmp_path / "model", tmp_path / "cost.json", tmp_path / "trace.jsonl"
    save_small_model(model, longest=1024)
    write_hash_ids(trace_file, random_paths(random.Random(5), requests=30), 40, output_length=64)
    arguments = ["fit", str(model), "--json", str(out), "--check", str(trace_file)]
    arguments += ["--num-blocks", "500", "--max-answer", "4", "--threads", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    figures = json.loads(out.read_text())
    assert read_cost(str(out)) == StepCost(**figures["cost"])
    assert figures["fit"]["num_steps"] > 100
    check = figures["check"]
    assert check["hit rate"]["predicted"] == pytest.approx(check["hit rate"]["measured"], abs=0.1)
    assert all(check[name]["measured"] > 0 < check[name]["predicted"] for name in check)


def test_scaled_traces_are_cut_to_what_a_model_takes() -> None:
    trace = trace_of([(0.0, [0, 1, 2, 3], 100), (1.0, [0, 1, 4], 3)])
    small = scaled(trace, 4, max_tokens=14, max_answer=2)
    small.check()
    assert small.input_lengths.tolist() == [12, 12]
    assert small.output_lengths.tolist() == [2, 1]
    first, second = token_prompts(small, range(5, 100))
    assert (first[:8] == second[:8]).all()
    assert (first[8:] != second[8:]).any()
    assert min(first.min(), second.min()) >= 5
