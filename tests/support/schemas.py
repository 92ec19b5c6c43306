"""JSON schemas of every kind that clients send, as a strategy of Hypothesis."""

from typing import Any, Final

from hypothesis import strategies as st

_SCALARS: Final = st.none() | st.booleans() | st.integers(-99, 99) | st.text('abé"\n', max_size=3)


def _arrays(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda item, low, more: {
            "type": "array",
            "items": item,
            "minItems": low,
            "maxItems": low + more,
        },
        items,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def _objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.text("abc é", min_size=1, max_size=3), values, max_size=3).flatmap(
        lambda properties: st.builds(
            lambda required, others: {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": others,
            },
            st.lists(st.sampled_from(sorted(properties)), unique=True)
            if properties
            else st.just([]),
            st.booleans() | values,
        )
    )


SCHEMAS: Final = st.recursive(
    st.sampled_from(
        [
            {"type": "null"},
            {"type": ["boolean", "null"]},
            {"type": "integer"},
            {"type": "number", "exclusiveMinimum": -1.5, "maximum": 12},
            {"type": "string", "format": "date"},
            {"type": "string", "pattern": "^[a-z]+-[0-9]{2}$"},
            {"type": "integer", "multipleOf": 3, "minimum": 7},
        ]
    )
    | st.builds(lambda low: {"type": "string", "minLength": low, "maxLength": 6}, st.integers(0, 6))
    | st.builds(
        lambda low: {"type": "integer", "minimum": low, "maximum": low + 9},
        st.integers(-(2**31), 2**31),
    )
    | st.builds(lambda value: {"const": value}, _SCALARS)
    | st.builds(lambda values: {"enum": values}, st.lists(_SCALARS, min_size=1, max_size=4)),
    lambda below: (
        _arrays(below)
        | _objects(below)
        | st.builds(lambda options: {"anyOf": options}, st.lists(below, min_size=1, max_size=3))
    ),
    max_leaves=6,
)
