from tests.native.cuda_fixture import fake_cuda
from tests.training.conftest import sigint

__all__ = ["fake_cuda", "sigint"]
