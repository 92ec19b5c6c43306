"""What an engine knows of encoders, of which it asks no text."""

from dataclasses import replace

import pytest

from batching import InvalidRequest
from batching.engine.request_checks import check_request
from batching.inputs.sampling_params import GREEDY
from batching.inputs.sequence_spec import SequenceSpec
from batching.pooling import CrossEncoder, PoolingParams
from tests.support.marker_tokenizer import MarkerTokenizer


def test_an_encoder_reads_and_does_not_write() -> None:
    model = replace(MarkerTokenizer().model, generates=False)
    spec = SequenceSpec(prompt=(1, 2), max_tokens=1, sampling=GREEDY)
    with pytest.raises(InvalidRequest, match="writes no text"):
        check_request(model, spec)
    check_request(model, replace(spec, max_tokens=0, pooling=PoolingParams()))


def test_a_pair_has_the_tokens_around_its_texts() -> None:
    assert CrossEncoder(before=(1,), between=(2, 3), after=(4,)).num_tokens == 4
