import pytest
import torch

# Tests are many and small: threads would only wait for one another.
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """No test, nor a command that it starts, reads or writes the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMATTN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
