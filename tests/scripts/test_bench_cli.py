import pytest

from scripts.bench.cli import parse
from scripts.bench.load.plan import ClosedLoop


def test_without_options_it_is_our_server_with_short_prompts() -> None:
    options = parse([])
    assert [spec.name for spec in options.servers] == ["ours"]
    (point,) = options.plan.points
    assert (point.scenario.name, point.max_tokens) == ("short", 48)
    assert point.arrivals == ClosedLoop(num_clients=16, requests_per_client=2)
    assert options.plan.rounds == 3


def test_numbers_of_clients_make_a_sweep() -> None:
    options = parse(["--clients", "8,1,2,2", "--scenario", "long"])
    assert [point.arrivals for point in options.plan.points] == [
        ClosedLoop(1, 2),
        ClosedLoop(2, 2),
        ClosedLoop(8, 2),
    ]


def test_all_means_all_scenarios_with_their_own_clients() -> None:
    options = parse(["--scenario", "all", "--max-tokens", "5", "--requests", "3"])
    assert [point.title for point in options.plan.points] == [
        "short, 16 clients",
        "shared-prefix, 8 clients",
        "long, 4 clients",
        "mixed, 8 clients",
        "multi-turn, 4 clients",
    ]
    assert {point.max_tokens for point in options.plan.points} == {5}
    assert options.plan.num_requests == 3 * 3 * (16 + 8 + 4 + 8 + 4)


def test_servers_have_names_and_the_model_is_for_the_first() -> None:
    options = parse(
        ["--url", "http://a", "--model", "m", "--vs", "b=http://b#n", "--vs-command", "c {port}"]
    )
    assert [(spec.name, spec.model) for spec in options.servers] == [
        ("a", "m"),
        ("b", "n"),
        ("c", None),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--clients", "0"], "0 is not a count"),
        (["--clients", "4,-1"], "-1 is not a count"),
        (["--timeout", "0"], "0 is not above 0"),
        (["--timeout", "inf"], "inf is not above 0"),
        (["--scenario", "other"], "invalid choice: 'other'"),
        (["--url", "box:80"], "'box:80' is no URL"),
        (["--vs-command", "srv"], "has no {port}"),
        (["--vs-command", "srv '{port}"], "No closing quotation"),
        (["--json", "no/such/x.json"], "there is no directory no/such"),
        (["--vs", "a=http://a", "--vs", "a=http://b"], "two servers are called 'a'"),
        (["--vs", "ours=http://a"], "two servers are called 'ours'"),
    ],
)
def test_what_makes_no_sense_is_rejected_with_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse(words)
    assert left.value.code == 2
    assert message in capsys.readouterr().err
