"""Failures of nodes that the run needs stop it; those of others warn, and it goes on without."""

import pytest

from hybridrl.doctor.findings import Stage, Verdict, fail, ok
from hybridrl.doctor.stages import cover, run_stages
from tests.support.host_cases import case
from tests.support.run_configs import run_config

pytestmark = pytest.mark.full


class Named:
    """Nodes of these names, which nothing is asked."""

    def __init__(self, *nodes):
        self.nodes = list(nodes)
        self.addresses = {node: f"10.0.0.{k}" for k, node in enumerate(nodes)}
        self.resources = None


@pytest.fixture(scope="module")
def config():
    """A run on two nodes."""
    config = run_config()
    config.cluster.nodes = 2
    return config


def judged(config, nodes, *findings_of_stages):
    """(node, verdict) of what stages have found, and the cases that these were given."""
    cases = []

    def check(findings):
        return lambda given: cases.append(given) or [*findings]

    order = [(stage, check(findings)) for stage, findings in findings_of_stages]
    reports = list(run_stages(case(config=config, agents=Named(*nodes)), order))
    return [(f.node, f.verdict) for report in reports for f in report.findings], cases


def broken(node, check="host.gpus"):
    return fail(check, node, "it is broken", "Mend it.")


def unreached(source, target):
    return broken(f"{source} -> {target}", "network.ports")


def test_a_sick_spare_node_warns_and_gets_no_rank_in_later_stages(config):
    later = (Stage.network, [ok("network.ports", "all", "fine")])
    found, cases = judged(config, "abc", (Stage.host, [broken("c")]), later)
    assert found == [("c", Verdict.warn), ("all", Verdict.ok)]
    assert cases[1].slots == {"a": 1, "b": 1, "c": 0}


def test_a_warning_says_that_the_run_can_do_without():
    config = run_config()
    reports = run_stages(
        case(config=config, agents=Named("a", "b")), [(Stage.host, lambda _: [broken("b")])]
    )
    (finding,) = next(reports).findings
    assert finding.evidence == "it is broken; the run fits without b"
    assert finding.advice.startswith("Mend it. ") and "`ray stop` there" in finding.advice


def test_without_a_spare_node_each_failure_stands(config):
    found, _ = judged(config, "ab", (Stage.host, [broken("b")]))
    assert found == [("b", Verdict.fail)]


def test_two_sick_nodes_are_one_too_many(config):
    found, _ = judged(config, "abc", (Stage.host, [broken("b"), broken("c")]))
    assert found == [("b", Verdict.fail), ("c", Verdict.fail)]


def test_sick_nodes_of_several_stages_add_up(config):
    stages = (Stage.host, [broken("c")]), (Stage.memory, [broken("b", "memory.host")])
    found, _ = judged(config, "abc", *stages)
    assert found == [("c", Verdict.warn), ("b", Verdict.fail)]


def test_a_node_that_nobody_reaches_is_the_one_to_do_without(config):
    pairs = [("a", "c"), ("b", "c"), ("c", "a"), ("c", "b")]
    found, cases = judged(
        config,
        "abc",
        (Stage.network, [unreached(*pair) for pair in pairs]),
        (Stage.memory, [ok("memory.host", "a", "fine")]),
    )
    assert {verdict for _, verdict in found[:4]} == {Verdict.warn}
    assert cases[1].slots == {"a": 1, "b": 1, "c": 0}


def test_three_nodes_of_which_no_two_reach_each_other_fail(config):
    pairs = [("a", "b"), ("b", "c"), ("c", "a")]
    found, _ = judged(config, "abc", (Stage.network, [unreached(*pair) for pair in pairs]))
    assert {verdict for _, verdict in found} == {Verdict.fail}


@pytest.mark.parametrize("check", ["host.shm", "inputs.tokenizer"])
def test_what_the_driver_itself_needs_fails_on_its_node(config, check):
    stage = Stage(check.partition(".")[0])
    found, _ = judged(config, "abc", (stage, [broken("a", check), broken("b", check)]))
    assert found == [("a", Verdict.fail), ("b", Verdict.warn)]


@pytest.mark.parametrize("stage", [Stage.ray, Stage.placement])
def test_what_the_cluster_lacks_is_no_nodes_fault(config, stage):
    check = {Stage.ray: "ray.loopback", Stage.placement: "placement.slots"}[stage]
    found, _ = judged(config, "abc", (stage, [broken("b", check)]))
    assert found == [("b", Verdict.fail)]


def test_failures_of_pairs_are_laid_to_the_node_with_most_of_them():
    pairs = [frozenset(pair) for pair in ("ac", "bc", "cd")]
    assert cover(pairs) == {"c"}
    assert cover([*pairs, frozenset("a")]) == {"a", "c"}
