import io
import logging

import pytest

from extproc.adapters.service_log import FewOfEach, PrivateFormatter

QUOTED = "my prompt"


@pytest.fixture
def written():
    """A logger, and what it has written so far."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrivateFormatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("warmroute.test")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield logger, stream.getvalue
    logger.removeHandler(handler)


def fail(text):
    return int(text)


def test_of_an_exception_its_type_and_place_are_shown_and_not_what_it_says(written):
    logger, text = written
    try:
        fail(QUOTED)
    except ValueError:
        logger.exception("encoding failed")
    assert "ERROR encoding failed" in text()
    assert "ValueError" in text()
    assert "in fail" in text()
    assert QUOTED not in text()


def test_nor_what_those_say_that_it_came_from(written):
    logger, text = written

    def outer(*, chained):
        try:
            fail(QUOTED)
        except ValueError as error:
            if chained:
                raise KeyError(QUOTED) from error
            raise LookupError(QUOTED)  # noqa: B904  # that is the case

    for chained in (True, False):
        try:
            outer(chained=chained)
        except LookupError:
            logger.exception("failed")
    assert QUOTED not in text()
    assert text().index("ValueError") < text().index("KeyError")
    assert "LookupError" in text()


def test_errors_of_the_system_keep_their_words(written):
    logger, text = written
    try:
        open("/no/such/file")  # noqa: PTH123, SIM115
    except OSError:
        logger.exception("failed")
    assert "[Errno 2] No such file or directory" in text()


def test_a_flood_is_counted_instead_of_written(written):
    logger, text = written
    now = [0.0]
    logger.handlers[0].addFilter(FewOfEach(most=3, window_s=60.0, clock=lambda: now[0]))

    def complain():
        logger.warning("closing a stream: %s", "why")

    for _ in range(1000):
        complain()
    logger.warning("another place")
    assert text().count("closing a stream") == 3
    assert "another place" in text()
    now[0] = 61.0
    complain()
    assert "closing a stream: why (997 more like this were not logged)" in text()


def test_what_is_no_warning_is_not_counted(written):
    logger, text = written
    logger.handlers[0].addFilter(FewOfEach(most=1))
    for _ in range(5):
        logger.info("a step")
    assert text().count("a step") == 5
