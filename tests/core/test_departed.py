from extproc.core.departed import Departed
from extproc.core.load_ledger import LoadLedger
from tests.support.core import decision


def leases(count):
    ledger = LoadLedger()
    return [ledger.admit(decision(str(n)), 1, (), 0.0, 1e9) for n in range(count)]


def test_each_is_taken_once():
    one, two = leases(2)
    departed = Departed()
    assert (departed.keep(one), departed.keep(two)) == (None, None)
    assert (departed.get("0"), list(departed)) == (one, [one, two])
    assert (departed.take("0"), departed.take("0"), len(departed)) == (one, None, 1)


def test_of_too_many_the_oldest_is_told():
    one, two, three = leases(3)
    departed = Departed(most=2)
    assert [departed.keep(lease) for lease in (one, two, three)] == [None, None, one]
    departed.take(one.id)
    assert list(departed) == [two, three]
