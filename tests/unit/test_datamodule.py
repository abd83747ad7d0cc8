from __future__ import annotations

import pytest
from trivet.data.datamodule import DataModule
from trivet.errors import ConfigurationError


def test_defaults():
    class Data(DataModule):
        pass

    data = Data()
    data.prepare_data()
    data.setup("fit")
    data.teardown("fit")
    assert (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()) == (None, None, None)
    assert data.state_dict() == {}
    data.load_state_dict({})
    data.on_exception(ValueError())
    with pytest.raises(ConfigurationError, match="Data has no train_dataloader"):
        data.train_dataloader()
