"""Plans of studies: what they refuse, what they draw, which cells they come to, and how their changes are told."""

import copy

import pytest

from siamesenorm.errors import ConfigError
from siamesenorm.lab.study.cells import cells_of, find_cell
from siamesenorm.lab.study.plan import changes, parse_plan

from .study_records import fill, plan_file, plan_values, record


def with_(path, value):
    values = copy.deepcopy(plan_values())
    *sections, name = path.split(".")
    inner = values
    for section in sections:
        inner = inner[int(section)] if section.isdigit() else inner[section]
    inner[name] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("baseline", "prenorm", "baseline: 'prenorm' is not known; it takes one of pre, siamese, post"),
        ("arms", {"pre": "pre"}, "arms: "),
        ("parts.0.corpus", "books", "parts.first.corpus: 'books' is not known"),
        ("parts.0.size", "huge", "parts.first.size: 'huge' is not known"),
        ("parts.0.arms", ["post"], "has no 'pre'; the baseline belongs to every part"),
        ("parts.0.seeds", 7, "parts.first.seeds: 7 is not allowed; seeds has 6"),
        ("parts.0.configurations", 0, "parts.first.configurations: 0 is not allowed; it takes a whole number from 1"),
        ("parts.0.stress", True, "the plan has no section stress"),
        ("seeds", [1, 1, 2, 3, 4, 5], "seeds: one is given twice"),
        (
            "seeds",
            [1, 2, 3, 4, 5, 1000],
            "seeds: 1000 is not allowed; the seed of the search is none of those compared",
        ),
        ("search.space", {"optimizer.lr": {"low": 0.0, "high": 1.0}}, "low = 0 is not allowed with scale log"),
        ("search.space", {"optimizer.lr": {"low": 1.0}}, "it takes low and high, or choices"),
        ("set", {"train.seed": 3}, "set: train.seed is not allowed; arms, parts and seeds decide it"),
        ("name", "Two words", "name: "),
        ("sizes.small", 3, "sizes.small: 3 is not allowed; it takes the fields set"),
        ("parts.0.speed", 3, "unknown field 'speed'"),
        ("arms", {"pre": "pre", "a/b": "post"}, "arms: the name 'a/b' is not allowed; it takes up to 40 letters"),
        ("parts.0.name", "a\n| b", "is not allowed; it takes words on one line"),
        ("colour", "red", "unknown field 'colour'"),
        ("sensitivity", {"rates": [1e-3, 0]}, "sensitivity.rates: 0 is not allowed; it takes finite numbers above 0"),
        ("sensitivity", {"rates": [1e-3, float("inf")]}, "sensitivity.rates"),
        ("sensitivity", {"rates": [1e-3, 0.001]}, "sensitivity.rates: 0.001 is given twice"),
        ("sensitivity", {"rates": [1e-3, 10**400]}, "is not allowed; it takes a list of numbers"),
        ("stress", {"factors": [-2.0]}, "stress.factors: -2 is not allowed; it takes finite numbers above 0"),
        ("stress", {"factors": [2, 2.0000001]}, "stress.factors: 2 is given twice"),
        ("search.space", {"optimizer.lr": {"low": 1, "high": 10**400}}, "is not allowed; it takes a number, or null"),
    ],
)
def test_a_plan_that_is_none_is_refused_in_one_sentence(path, value, words):
    with pytest.raises(ConfigError, match=r"^plan: ") as refused:
        parse_plan(with_(path, value))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_arm_gets_the_same_draws_and_none_of_the_compared_seeds():
    file = plan_file()
    cells = cells_of(file, file.plan.parts[0], {})
    draws = {arm: [cell.drawn for cell in cells if cell.arm == arm] for arm in file.plan.arms}
    assert draws["pre"] == draws["siamese"] == draws["post"]
    assert len({str(drawn) for drawn in draws["pre"]}) == 4
    assert all(1e-3 <= drawn["optimizer.lr"] <= 1e-1 and drawn["schedule.warmup"] in (0, 4) for drawn in draws["pre"])
    assert {cell.seed for cell in cells} == {1000}
    assert [cell.arm for cell in cells[:3]] == ["pre", "siamese", "post"]  # cut anywhere, arms have had equally many


def test_more_configurations_go_on_from_those_that_were_drawn():
    few, many = plan_file(configurations=3), plan_file(configurations=5)
    keys = [{c.key for c in cells_of(file, file.plan.parts[0], {})} for file in (few, many)]
    assert keys[0] < keys[1]


def test_the_winner_is_trained_with_fresh_seeds_and_stressed_at_multiples_of_its_own_rate():
    values = plan_values(stress={"factors": [2, 4], "seeds": 1})
    values["sensitivity"] = {"rates": [1e-3, 1e-2]}
    values["parts"][0] |= {"stress": True, "sensitivity": True}
    file = plan_file(**values)
    best = {"pre": 2, "siamese": 0, "post": 3}
    records = fill(file, lambda cell: 2.0 if cell.number == best[cell.arm] else 2.5)
    cells = cells_of(file, file.plan.parts[0], records)
    for arm, number in best.items():
        drawn = file.plan.search.draw(number)
        fresh = [cell for cell in cells if (cell.arm, cell.stage) == (arm, "fresh")]
        assert [cell.seed for cell in fresh] == [1, 2, 3, 4, 5, 6]
        assert {cell.lr for cell in fresh} == {drawn["optimizer.lr"]}
        stress = [cell for cell in cells if (cell.arm, cell.stage) == (arm, "stress")]
        assert [cell.lr for cell in stress] == pytest.approx([2 * drawn["optimizer.lr"], 4 * drawn["optimizer.lr"]])
        assert {cell.config.schedule.kind for cell in stress} == {"constant"}
        rates = [cell for cell in cells if (cell.arm, cell.stage) == (arm, "sensitivity")]
        assert [cell.lr for cell in rates] == [1e-3, 1e-2]
        assert {cell.config.schedule.warmup for cell in rates} == {drawn["schedule.warmup"]}


def test_until_a_search_is_complete_nobody_wins():
    file = plan_file()
    records = {}
    for cell in cells_of(file, file.plan.parts[0], {})[:-1]:
        records[cell.key] = record(cell, 2.0)
    stages = {(cell.arm, cell.stage) for cell in cells_of(file, file.plan.parts[0], records)}
    assert ("pre", "fresh") in stages
    assert ("post", "fresh") not in stages


def test_an_arm_that_is_added_changes_no_other_cell():
    before, after = plan_file(), plan_file(arms={"pre": "pre", "siamese": "siamese", "post": "post", "gr": "gr"})
    records = fill(before, lambda cell: 2.0 + cell.number / 100)
    missing = [c for c in cells_of(after, after.plan.parts[0], records) if c.key not in records]
    assert {cell.arm for cell in missing} == {"gr"}


def test_cells_are_known_by_the_content_of_their_data_not_by_its_place():
    def file(name, digest):
        return plan_file(corpora={"code": {"set": {"data.train": [name]}, "sha256": {name: digest}}})

    def keys(found):
        return [cell.key for cell in cells_of(found, found.plan.parts[0], {})]

    assert keys(file("here/a.npy", "ab")) == keys(file("there/b.npy", "ab"))
    assert not {*keys(file("here/a.npy", "ab"))} & {*keys(file("here/a.npy", "cd"))}


def test_a_cell_is_found_by_its_title_and_others_are_refused():
    file = plan_file()
    assert find_cell(file, {}, "code/small/adamw/siamese/search-2").number == 2
    with pytest.raises(ConfigError, match=r"^--challenge: 'x' is no cell"):
        find_cell(file, {}, "x")


def test_what_was_changed_in_a_plan_is_said_field_by_field():
    one, other = plan_values(), plan_values()
    other["parts"][0]["configurations"] = 9
    other["arms"]["gr"] = "gr"
    del other["arms"]["post"]
    found = changes(one, other)
    assert found == [
        "arms.post: 'post' was taken out",
        "parts.first.configurations: 4 became 9",
        "arms.gr: 'gr' is new",
    ]


def test_an_order_an_empty_section_and_a_kind_of_number_are_changes_too():
    """Each of them changes the hash of a plan, so each is said."""
    part = plan_values()["parts"][0]
    one = {"set": {}, "weight": 1, "parts": [{**part, "name": name} for name in "abc"]}
    assert changes(one, one) == []
    assert changes(one, {**one, "parts": [one["parts"][n] for n in (0, 2, 1)]}) == [
        "parts: the order a, b, c became a, c, b"
    ]
    assert changes(one, {**one, "set": None}) == ["set: {} became null"]
    assert changes({"weight": 1}, {"weight": 1, "set": {}}) == ["set: {} is new"]
    assert changes(one, {**one, "weight": 1.0}) == ["weight: 1 became 1.0"]
    fewer = changes(one, {**one, "parts": one["parts"][1:]})
    assert fewer
    assert not any("order" in sentence for sentence in fewer)
