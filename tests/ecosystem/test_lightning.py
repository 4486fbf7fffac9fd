"""Lightning's Trainer: training, and a checkpoint resumed bit for bit."""

import torch
from packages import needs
from torch import nn

from onlinenorm.torch import OnlineNorm1d

lightning = needs("lightning")


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), OnlineNorm1d(16, 0.99, alpha_bwd=0.9), nn.ReLU(), nn.Linear(16, 1))
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self.body(x), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        self.log("loss", nn.functional.mse_loss(self.body(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit(folder, epochs, resume=None, **kwargs):
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).tanh())
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model = Net()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **kwargs,
    )
    trainer.fit(model, loader, loader, ckpt_path=resume)
    return model, trainer


def test_train_and_resume(tmp_path):
    whole, _ = fit(tmp_path / "whole", 4)
    _, trainer = fit(tmp_path / "half", 2)
    resumed, _ = fit(tmp_path / "rest", 4, trainer.checkpoint_callback.best_model_path)
    assert sum(whole.losses[-16:]) < sum(whole.losses[:16])
    assert resumed.losses == whole.losses[32:]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert whole.body[1].num_samples_tracked == 4 * 64, "validation moved the statistics"


def test_mixed_precision_keeps_the_state_wide(tmp_path):
    model, _ = fit(tmp_path, 1, precision="bf16-mixed")
    assert model.body[1].running_mean.dtype == model.body[1].control_y.dtype == torch.float64
    assert model.body[1].control_y.any()
