import gc

import pytest

from meshkit.core.uncollected import uncollected


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_afterwards_as_it_was_whatever_happens_inside(collects):
    try:
        if not collects:
            gc.disable()

        @uncollected()
        def raises():
            assert not gc.isenabled()
            with uncollected():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ValueError

        with pytest.raises(ValueError):
            raises()
        assert gc.isenabled() == collects
    finally:
        gc.enable()
