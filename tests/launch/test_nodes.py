"""Several nodes: what flags mean and contradict, how nodes meet, and how one that is lost is noticed. No processes."""

import re
import socket
import threading
import time

import pytest
import trivet
from clusters import free_port
from torch.distributed import HashStore
from trivet.errors import ConfigurationError, LaunchError, PlanError, RankFailed
from trivet.launch import nodes
from trivet.launch.meeting import Meeting
from trivet.launch.nodes import Beats, News

HERE = {"num_nodes": 2, "node_rank": 1, "main_address": "host1"}


def trainer(**flags):
    return trivet.Trainer(accelerator="cpu", enable_progress_bar=False, logger=False, **flags)


def test_the_plan_shows_nodes():
    plan = trainer(**HERE, devices=4).plan()
    assert (plan.world_size, plan.num_nodes, plan.launcher) == (8, 2, "local")
    assert "processes    8 (4 on each of 2 nodes), started here" in str(plan)
    assert "trivet: node 1 of 2, which meet at host1:29500" in plan.banner()
    assert (
        "node 1 of 2, which meet at [fe80::1]:7"
        in trainer(**HERE | {"main_address": "fe80::1", "main_port": 7}).plan().notes
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (HERE | {"node_rank": None}, r"--num_nodes 2 and launcher 'local' .* node_rank is\s+not given"),
        (HERE | {"main_address": None}, r"--num_nodes 2 and launcher 'local' .* main_address is\s+not given"),
        (HERE | {"node_rank": 2}, r"--node_rank 2 and --num_nodes 2: nodes have the numbers 0 to 1"),
        ({"node_rank": 0}, r"--node_rank 0 and one node: there is one node; give --num_nodes, too, or leave that out"),
        ({"devices": 2, "main_port": 7}, r"--main_port 7 and one node: there is one node"),
        (
            HERE | {"launcher": "ray"},
            r"--node_rank 1 --main_address host1 and --num_nodes 2: launcher 'ray' .* numbers",
        ),
    ],
)
def test_contradictions_are_refused_when_the_trainer_is_made(flags, message):
    with pytest.raises(PlanError, match=f"(?s){message}") as caught:
        trainer(**flags)
    assert all(conflict.remedy for conflict in caught.value.conflicts)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"node_rank": -1}, "node_rank=-1. Expected a number from 0 up"),
        ({"main_port": 70000}, "main_port=70000. Expected a number from 1 to 65535"),
        (
            {"main_address": "host1:29500"},
            "main_address='host1:29500'. Expected the name or the address of node 0 alone",
        ),
        ({"max_restarts": 1}, "max_restarts=1: each node starts its own processes"),
        ({"min_devices": 1}, "min_devices=1: each node starts its own processes"),
    ],
)
def test_values_that_mean_nothing(flags, message):
    with pytest.raises(ConfigurationError, match=message):
        trainer(**HERE | flags)


# meeting


def meet(*meetings):
    """What each found, or the error that it raised."""
    found = [None] * len(meetings)

    def one(index):
        try:
            found[index] = meetings[index].next_rendezvous()
        except LaunchError as error:
            found[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(meetings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def node(rank, port, num_nodes=2, devices=1, **options):
    return Meeting(rank, num_nodes, devices, port=port, **{"wait_s": 20.0, **options})


def test_nodes_meet_and_agree_on_a_name():
    port = free_port()
    pair = [node(0, port), node(1, port)]
    first, second = meet(*pair)
    assert [(one.rank, one.world_size) for one in (first, second)] == [(0, 2), (1, 2)]
    assert second.bootstrap_store_info.master_port == port
    assert pair[0].get_run_id() == pair[1].get_run_id()
    first.store.set("said", "on 0")
    assert second.store.get("said") == b"on 0"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"rank": 1, "devices": 4}, r"devices=4"),
        ({"rank": 1, "num_nodes": 3}, r"num_nodes=3"),
        ({"rank": 1, "launch": 1}, r"did not reach node 0 .*: it is still in its launch number 1"),
        ({"rank": 0}, r"another process has it|was given twice"),
    ],
)
def test_nodes_that_contradict_each_other(other, message):
    port, wait = free_port(), 2.0 if "launch" in other else 20.0
    if other["rank"] == 0:
        first = node(0, port, num_nodes=1)
        first.next_rendezvous()
        found = meet(node(0, port, wait_s=wait))
    else:
        found = meet(node(0, port, wait_s=wait), node(port=port, **{"wait_s": wait, **other}))
    errors = [str(one) for one in found if isinstance(one, LaunchError)]
    assert len(errors) == len(found)
    assert any(re.search(message, error) for error in errors), errors


def test_a_number_that_was_given_twice():
    port = free_port()
    found = meet(node(0, port, num_nodes=3, wait_s=2.0), *(node(1, port, num_nodes=3, wait_s=3.0) for _ in range(2)))
    assert sum("--node_rank 1 was given twice" in str(one) for one in found) == 1
    assert "nothing came from node 2" in str(found[0])


def test_nobody_comes_or_nobody_is_there():
    port = free_port()
    assert "nothing came from node 1. Start the same command there" in str(meet(node(0, port, wait_s=0.5))[0])
    port = free_port()  # of the other one the store is still held by the error
    (alone,) = meet(node(1, port, wait_s=0.5))
    assert f"node 1 did not reach node 0 at 127.0.0.1:{port} within 0.5 s" in str(alone)
    (elsewhere,) = meet(Meeting(0, 2, 1, host="192.0.2.1", port=port))
    assert "--main_address has to be an address, or the name, of node 0 itself" in str(elsewhere)


def test_a_single_node_is_its_own_and_listens_on_loopback_alone():
    one = Meeting()
    info = one.next_rendezvous()
    assert (info.rank, info.world_size, one.host) == (0, 1, "127.0.0.1")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", one.port), timeout=2)


# being lost


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(nodes.time, "monotonic", lambda: Clock.now)
    return Clock


def test_node_0_tells_of_a_silent_node_and_the_others_of_a_silent_store(clock):
    store = HashStore()
    zero, one = (Beats(store, rank, 2, 4, tells=rank == 0, name=f"host{rank}", timeout=30) for rank in (0, 1))
    for _ in range(3):
        zero.beat()
        one.beat()
        clock.now += 10
        assert (zero.lost(), one.lost()) == (None, None)
    zero.beat()
    clock.now += 20.1
    zero.beat()
    assert zero.lost().args[0] == (
        "rank 4 failed with NodeLost: lost node 1 of 2 at host1 (ranks 4 to 7): nothing was heard of it for 20 s. The "
        "machine, its network or its processes are gone."
    )
    assert "lost node 0 of 2 at host0 (ranks 0 to 3): its store has not answered for 30 s" in str(one.lost())


def test_a_node_that_has_yet_to_begin_is_not_lost(clock):
    zero = Beats(HashStore(), 0, 2, 1, tells=True)
    zero.beat()
    clock.now += 1000
    zero.beat()
    assert zero.lost() is None


@pytest.mark.parametrize(("timeout", "after"), [(None, 60), (1000, 60), (30, 20), (15, 5), (6, 2)])
def test_a_lost_node_is_noticed_early_enough_for_all_to_end_in_time(timeout, after):
    assert nodes.lost_after(timeout) == after


def test_the_first_failure_and_a_request_to_stop_reach_the_other_nodes():
    store = HashStore()
    pair = [News(store, Beats(store, rank, 2, 1, tells=rank == 0), 2) for rank in (0, 1)]
    for one in pair:
        one.start()
    pair[1].post(RankFailed(1, "ValueError", "boom", "its traceback"))
    pair[0].ask(15)
    until = time.monotonic() + 20
    while not all(one.failed and one.asked for one in pair):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert [str(one.failed) for one in pair] == ["rank 1 failed with ValueError: boom"] * 2
    pair[1].stop()
    while not pair[0].alone:
        assert time.monotonic() < until
        time.sleep(0.01)
    pair[0].stop()


def test_the_interface_that_leads_to_another_node():
    assert nodes.address_towards("127.0.0.1", 1) == "127.0.0.1"
    assert nodes.interface_of("127.0.0.1") == "lo"
    assert nodes.interface_of("192.0.2.1") == ""
