"""The deadline and the cache salt of an admitted request."""

import pytest

from app.admission.admitted_request import AdmittedRequest, Deadline
from app.admission.controller import AdmissionController, AdmissionLimits
from app.http.client import ANONYMOUS, Client
from batching import DeadlineExceeded, Priority, Retention, SequenceSpec
from tests.support.fakes import FakeClock


def admitted(client: Client) -> AdmittedRequest:
    controller = AdmissionController(AdmissionLimits(), FakeClock())
    ticket = controller.admit(client, Priority.NORMAL)
    return AdmittedRequest(ticket=ticket, deadline=Deadline(0.0))


def test_a_deadline_says_how_much_time_is_left() -> None:
    clock = FakeClock(7.5)
    assert Deadline(5.0, None, clock).time_left() is None
    deadline = Deadline(5.0, 10.0, clock)
    assert (deadline.elapsed(), deadline.time_left()) == (2.5, 7.5)
    clock.now = 15.0
    with pytest.raises(DeadlineExceeded):
        deadline.time_left()


def test_no_client_finds_what_is_cached_for_another() -> None:
    requests = [admitted(client) for client in (ANONYMOUS, Client("a", "x"), Client("b"))]
    salts = {request.cache_salt(salt) for request in requests[:2] for salt in ("", "s", "x")}
    assert len(salts) == 6
    assert requests[0].cache_salt("") == requests[2].cache_salt("") == ""


def test_no_client_retains_for_another_whatever_it_calls_itself() -> None:
    spec = SequenceSpec(prompt=(1,), cache_salt="s", retention=Retention("a", client="b"))
    for client in (Client("a", "x"), Client("b")):
        assert admitted(client).applied_to(spec).retention == Retention("a", client=client.name)
