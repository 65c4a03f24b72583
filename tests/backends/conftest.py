import pytest
from draft_sessions import KINDS, Kind


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    request.getfixturevalue("opencl_device" if found == "opencl" else "onnx_provider")  # skips where there is none
    return found
