"""Hugging Face's Trainer: training, saving, and resuming bit for bit."""

import torch
from packages import needs
from torch import nn

from onlinenorm.torch import OnlineNorm1d

transformers = needs("transformers")
needs("accelerate")


class Net(transformers.PreTrainedModel):
    config_class = transformers.PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.body = nn.Sequential(nn.Linear(6, 16), OnlineNorm1d(16, 0.99, alpha_bwd=0.9), nn.ReLU(), nn.Linear(16, 1))
        self.post_init()

    def forward(self, x, labels=None):
        z = self.body(x)
        return {"loss": nn.functional.mse_loss(z, labels), "logits": z}


def rows():
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum(0, keepdim=True).tanh()} for row in x]


def fit(folder, resume=None):
    transformers.set_seed(0)
    model = Net(transformers.PretrainedConfig())
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=16,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        save_steps=8,
        logging_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = rows()
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    return model, trainer


def test_train_save_and_resume(tmp_path):
    whole, trainer = fit(tmp_path)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    resumed, _ = fit(tmp_path / "resumed", str(tmp_path / "checkpoint-8"))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert whole.body[1].num_samples_tracked == 64
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    trainer.evaluate()
    for name, value in whole.state_dict().items():
        assert torch.equal(value, before[name]), f"evaluation moved {name}"


def test_save_and_load(tmp_path):
    model, _ = fit(tmp_path)
    model.save_pretrained(tmp_path / "saved")
    loaded = Net.from_pretrained(tmp_path / "saved")
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
        assert value.dtype == loaded.state_dict()[name].dtype, name
