from tests.native.cuda_fixture import fake_cuda

__all__ = ["fake_cuda"]
