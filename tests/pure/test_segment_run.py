"""How tensors go through the layers of a segment, and from visit to visit of a route."""

from __future__ import annotations

import pytest

from ringtmp.errors import ProtocolError
from ringtmp.model.portable_layer import Graph, Input, Layer, Op, OutputTree, Ref, Value
from ringtmp.plan.route import route_over
from ringtmp.runtime.segment_run import Crossings, segment_run
from ringtmp.strategies.ring.tensor_routes import crossings_of, flow_of, neighbours, ways_of


def cell(*takes: Value, gives: int = 1, operator: str = "aten.tanh.default") -> Layer:
    """A layer that applies an operator to the first it takes, and gives that several times."""
    inputs = tuple(Input("input", str(at)) for at in range(len(takes)))
    graph = Graph(inputs, (Op(operator, (Ref(0),), {}),), (Ref(len(takes)),) * gives, False)
    return Layer("cell", graph, graph, (), OutputTree("*"), train_takes=takes, evaluate_takes=takes)


def listed() -> Layer:
    graph = cell((0, 0)).train
    return Layer("listed", graph, graph, (), OutputTree("*"))


#: Layer 0 gives two tensors; the second is used by layer 2 and again by layer 3.
SKIP = [cell((0, 0), gives=2), cell((1, 0)), cell((2, 0), (1, 1)), cell((3, 0), (1, 1))]


def test_in_a_list_everything_goes_to_the_next() -> None:
    run = segment_run([(4, listed()), (5, listed())], True)
    assert run.crossings == Crossings(((4, 0),), ((6, 0),))
    assert [(each.takes, each.gives, each.done) for each in run.steps] == [
        (((4, 0),), ((5, 0),), ((4, 0),)),
        (((5, 0),), ((6, 0),), ((5, 0),)),
    ]


def test_a_tensor_is_let_go_behind_its_last_user_and_never_where_it_leaves() -> None:
    layers = list(enumerate(SKIP))
    run = segment_run(layers, True)
    assert [each.done for each in run.steps] == [((0, 0),), ((1, 0),), ((2, 0),), ((3, 0), (1, 1))]
    run = segment_run(layers[:3], True, Crossings(((0, 0),), ((3, 0), (1, 1))))
    assert [each.done for each in run.steps] == [((0, 0),), ((1, 0),), ((2, 0),)]


def test_what_nobody_takes_is_let_go_at_once() -> None:
    run = segment_run([(0, cell((0, 0), gives=2)), (1, cell((1, 0)))], True)
    assert [each.done for each in run.steps] == [((0, 0), (1, 1)), ((1, 0),)]


def test_something_may_enter_and_leave() -> None:
    run = segment_run([(2, SKIP[2])], True, Crossings(((2, 0), (1, 1)), ((3, 0), (1, 1))))
    assert run.steps[0].done == ((2, 0),)


def test_a_segment_without_layers_hands_on_what_enters() -> None:
    through = Crossings(((4, 0),), ((4, 0),))
    assert segment_run([], True, through).crossings == through


def test_what_is_changed_in_place_behind_a_view_is_known_by_where_it_entered() -> None:
    viewing = cell((0, 0), operator="aten.t.default")
    writing = cell((1, 0), (0, 1), operator="aten.relu_.default")
    assert segment_run([(0, viewing), (1, writing)], True, Crossings(((0, 1), (0, 0)), ((2, 0),))).written == {1}
    apart = cell((0, 0))
    assert segment_run([(0, apart), (1, writing)], True, Crossings(((0, 1), (0, 0)), ((2, 0),))).written == set()


def test_a_segment_that_gives_its_weight_or_a_view_of_it_lends_it() -> None:
    weight = (Input("parameter", "w"), Input("input", "0"))
    turned = Graph(weight, (Op("aten.t.default", (Ref(0),), {}),), (Ref(2), Ref(1)), False)
    copied = Graph(weight, (Op("aten.tanh.default", (Ref(0),), {}),), (Ref(2), Ref(1)), False)
    for graph, lends in ((turned, True), (copied, False)):
        layer = Layer("own", graph, graph, (), OutputTree("*"), train_takes=((0, 0),), evaluate_takes=((0, 0),))
        viewing = cell((1, 0), operator="aten.t.default")
        assert segment_run([(0, layer)], True).lends is lends
        assert segment_run([(0, layer), (1, viewing)], True).lends is lends
        assert not segment_run([(0, layer)], True, Crossings(((0, 0),), ((1, 1),))).lends


def test_a_segment_that_lacks_something_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not all of which the layers before it give"):
        segment_run([(2, SKIP[2])], True, Crossings(((2, 0),), ((3, 0),)))
    with pytest.raises(ProtocolError, match="a tensor it does not have"):
        segment_run([(1, SKIP[1])], True, Crossings(((1, 0),), ((2, 0), (1, 1))))


def test_a_skip_goes_from_its_maker_to_its_first_user_and_on_to_the_next() -> None:
    """a skip from visit 0 to 2 and 3      forward  0 ------> 2 -> 3
    back     0 <------ 2 <- 3"""
    route = route_over([0, 1, 2, 0], [(0, 1), (1, 2), (2, 3), (3, 4)])
    flow = flow_of(SKIP, route)
    training = {(each.source, each.target): each.values for each in flow if each.training}
    assert training == {
        (-1, 0): ((0, 0),),
        (0, 1): ((1, 0),),
        (1, 2): ((2, 0),),
        (2, 3): ((1, 1), (3, 0)),
        (3, 4): ((4, 0),),
        (0, 2): ((1, 1),),
    }
    assert ways_of(flow, 0, True).targets == (2,)
    assert ways_of(flow, 2, True).sources == (0,)
    assert ways_of(flow, 1, True).sources == ways_of(flow, 1, True).targets == ()
    assert crossings_of(ways_of(flow, 2, True)) == Crossings(((2, 0), (1, 1)), ((1, 1), (3, 0)))
    assert neighbours(route, flow, 2) == (0, 1)


def test_visits_of_one_segment_see_a_skip_once() -> None:
    flow = flow_of(SKIP, route_over([0, 1, 0], [(0, 1), (1, 2), (2, 4)]))
    training = {(each.source, each.target): each.values for each in flow if each.training}
    assert training[0, 2] == ((1, 1),)
    assert training[1, 2] == ((2, 0),)


def test_to_the_next_visit_there_is_always_an_edge_even_where_nothing_goes() -> None:
    """Passes begin and end with messages from neighbour to neighbour."""
    apart = [cell((0, 0)), cell((0, 1)), cell((1, 0), (2, 0))]
    flow = flow_of(apart, route_over([0, 1, 0], [(0, 1), (1, 2), (2, 3)]))
    training = {(each.source, each.target): each.values for each in flow if each.training}
    assert training == {
        (-1, 0): ((0, 0), (0, 1)),
        (0, 1): ((0, 1),),
        (1, 2): ((2, 0),),
        (2, 3): ((3, 0),),
        (0, 2): ((1, 0),),
    }
    lonely = [cell((0, 0)), cell((0, 1)), cell((1, 0))]
    flow = flow_of(lonely, route_over([0, 1, 0], [(0, 1), (1, 2), (2, 3)]))
    assert {(e.source, e.target): e.values for e in flow if e.training}[1, 2] == ()


def test_a_list_of_layers_needs_no_flow() -> None:
    assert flow_of([listed(), listed()], route_over([0], [(0, 2)])) == ()
