"""Columns to tensors: whatever comes is kept as it is, padded as it says, or refused by the names of column and sample."""

import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import DataError
from lockstep.data.collate import UnusableSample, collate

KEPT = ["float16", "float32", "float64", "uint8", "bool", "complex64"]


def spec(**fields):
    return DataSpec(modality="any", labels=(), **fields)


@settings(deadline=None)
@given(
    st.sampled_from([*KEPT, "int16", "int32", "int64", "uint16", ">f4", ">i4"]),
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
    st.lists(st.integers(1, 3), max_size=2),
    st.booleans(),
)
def test_rows_of_any_dtype_and_length(dtype, lengths, trailing, as_tensors):
    """Numbers, masks and dtypes are those of the rows; beyond their ends there is filling alone."""
    generator = np.random.default_rng(1)
    rows = [(generator.random((length, *trailing)) * 100).astype(dtype) for length in lengths]
    given_rows = [torch.as_tensor(row) for row in rows] if as_tensors and dtype[0] != ">" else rows
    batch = collate({"x": given_rows}, spec=spec(pad={"x": 1}, masks=("x",)))
    width = -(-max(lengths) // 8) * 8
    assert batch["x"].shape == (len(rows), width, *trailing)
    assert batch["x_mask"].sum(1).tolist() == lengths
    native = np.dtype(dtype).newbyteorder("=")
    is_token = not trailing and native.kind in "iu" and native != np.uint8
    assert batch["x"].dtype == (torch.int64 if is_token else torch.from_numpy(np.zeros(1, native)).dtype)
    for got, row in zip(batch["x"].numpy(), rows, strict=True):
        assert np.array_equal(got[: len(row)], row)
        assert np.all(got[len(row) :] == 1)


@pytest.mark.parametrize("dtype", KEPT)
def test_arrays_and_tensors_keep_their_dtype(dtype):
    array = np.ones((3, 4), dtype)
    batch = collate({"array": array, "rows": list(array), "tensor": torch.as_tensor(array)})
    assert {column.dtype for column in batch.values()} == {torch.as_tensor(array).dtype}
    assert {tuple(column.shape) for column in batch.values()} == {(3, 4)}, "rows of one shape are not padded"


def test_half_precision_rows_that_numpy_does_not_know():
    rows = [torch.ones(3, dtype=torch.bfloat16), torch.ones(5, dtype=torch.bfloat16)]
    batch = collate({"x": rows})
    assert batch["x"].dtype == torch.bfloat16
    assert batch["x"].sum(1).tolist() == [3, 5]


def test_columns_of_the_same_lengths_are_padded_alike():
    """Labels of tokens go with the tokens, also where all texts happen to be equally long."""
    rows = [np.arange(5), np.arange(5)]
    batch = collate(
        {"input_ids": rows, "labels": rows, "x": [np.zeros(3), np.ones(3)]}, 9, spec=spec(pad={"labels": -100})
    )
    assert batch["labels"].tolist() == [[0, 1, 2, 3, 4, -100, -100, -100]] * 2
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3, 4, 9, 9, 9]] * 2
    assert batch["x"].shape == (2, 3)


def test_numbers_lists_images_and_dicts_are_taken():
    grey, colour = Image.new("L", (4, 3), 7), Image.new("RGB", (4, 3), (1, 2, 3))
    batch = collate(
        {
            "number": [1, 2],
            "price": [1.5, 2.0],
            "flag": [True, False],
            "numpy": [np.float16(1), np.float16(2)],
            "list": [[1, 2, 3], []],
            "grey": [grey, grey],
            "colour": [colour, colour],
            "nested": {"a": np.zeros(2), "deep": {"b": [np.ones(2), np.ones(1)]}},
            "each": [{"u": 1, "v": [1.0]}, {"u": 2, "v": [2.0]}],
        },
        samples=[5, 6],
    )
    dtypes = {name: str(column.dtype).removeprefix("torch.") for name, column in batch.items()}
    assert dtypes == {
        **{"number": "int64", "price": "float32", "flag": "bool", "numpy": "float16", "list": "int64"},
        **{"grey": "uint8", "colour": "uint8", "nested.a": "float64", "nested.deep.b": "float64"},
        **{"each.u": "int64", "each.v": "float32"},
    }
    assert batch["colour"].shape == (2, 3, 3, 4)
    assert batch["colour"][0, :, 0, 0].tolist() == [1, 2, 3]
    assert batch["grey"].shape == (2, 1, 3, 4)
    assert batch["list"].tolist() == [[1, 2, 3, 0, 0, 0, 0, 0], [0] * 8]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([1.0, "a text"], "the column 'x' of sample 12 is the text 'a text', which no tensor can hold"),
        ([None, 1.0], "the column 'x' of sample 11 is None"),
        ([np.zeros(2), np.array(["a"])], "the column 'x' of sample 12 is an array of <U1"),
        ([{"a": 1}, {"b": 1}], "the column 'x' of sample 12 has the entries ['b'], but that of sample 11 has ['a']"),
        ([{"a": 1}, 3], "the column 'x' of sample 11 is a dict"),
        ([[{"a": 1}], [{"a": 2}]], "the column 'x' of sample 11 is a list"),
        ([[[1], [1, 2]], [[1], [2]]], "the column 'x' of sample 11 is a list"),
        ([np.zeros(3, np.float32), np.zeros(3)], "sample 12 is float64 of shape [3], but that of sample 11 is float32"),
        ([1, 2.5], "sample 12 is float32 of shape [], but that of sample 11 is int64"),
        ([np.zeros((3, 2)), np.zeros((3, 4))], "sample 12 is float64 of shape [3, 4], but that of sample 11 is"),
        ([np.zeros(2), 3.0], "sample 12 is float32 of shape [], but that of sample 11 is float64 of shape [2]"),
        ([1], "the column 'x' has 1 rows for 2 samples"),
        (np.zeros(3), "the column 'x' has 3 rows for 2 samples"),
        (np.array(["a", "b"]), "the column 'x' is an array of <U1"),
        (np.array([None, 1], dtype=object), "the column 'x' of sample 11 is None"),
        (np.array(["2020", "2021"], dtype="datetime64[Y]"), "the column 'x' is an array of datetime64[Y]"),
        ("ab", "the column 'x' is the text 'ab'"),
        (7, "the column 'x' is a int"),
        (None, "the column 'x' is None"),
        ({"deep": ["a", "b"]}, "the column 'x.deep' of sample 11 is the text 'a'"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(column, said):
    with pytest.raises(DataError, match=re.escape(said)):
        collate({"x": column}, samples=[11, 12])


def test_other_mistakes_of_columns():
    with pytest.raises(DataError, match="a column is named 3, a int: names are strings"):
        collate({3: np.zeros(2)})
    with pytest.raises(DataError, match=re.escape("two columns 'a.b'")):
        collate({"a.b": np.zeros(2), "a": {"b": np.zeros(2)}})
    with pytest.raises(DataError, match=re.escape("spec.pad['x'] = -1 cannot be held by a column of uint8")):
        collate({"x": [np.zeros(2, np.uint8), np.zeros(3, np.uint8)]}, spec=spec(pad={"x": -1}))
    with pytest.raises(DataError, match="cannot be held by a column of int64"):
        collate({"x": [np.zeros(2, int), np.zeros(3, int)]}, spec=spec(pad={"x": float("nan")}))
    assert collate({"x": [np.zeros(2), np.zeros(3)]}, spec=spec(pad={"x": float("nan")}))["x"].isnan().sum() == 6 + 5


def test_the_odd_one_of_several_is_named():
    rows = [np.zeros(2, np.float32)] * 4
    rows[0] = np.zeros(2)
    with pytest.raises(UnusableSample, match="of sample 40 is float64") as caught:
        collate({"x": rows}, samples=[40, 41, 42, 43])
    assert caught.value.sample == 40
    copy = pickle.loads(pickle.dumps(caught.value))  # as a loader's worker process sends it
    assert (str(copy), copy.sample) == (str(caught.value), 40)
