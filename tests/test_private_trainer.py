"""`PrivateTrainer`: the arguments of transformers, and what they become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import halfsilver as hs
from halfsilver.errors import ConfigError
from halfsilver.huggingface import Privacy, PrivateTrainer, causal_loss, loss_of, sequence_loss, token_loss

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
pytest.importorskip("accelerate")

WORDS, LENGTH = 30, 6
PRIVACY = Privacy(epsilon=4.0, delta=1e-4, population=200)


def sentences(rows: int, seed: int, **more: Any) -> Any:
    tokens = torch.randint(1, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed)).tolist()
    return datasets.Dataset.from_dict({"input_ids": tokens, "labels": tokens, **more})


def gpt2() -> Any:
    torch.manual_seed(0)
    size = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def arguments(folder: Path, **changes: Any) -> Any:
    usual = {"per_device_train_batch_size": 10, "gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 0.01}
    return transformers.TrainingArguments(output_dir=str(folder / "run"), report_to=[], **{**usual, **changes})


def trainer(folder: Path, model: Any = None, args: dict[str, Any] | None = None, **options: Any) -> PrivateTrainer:
    given = {"train_dataset": sentences(200, 0), "eval_dataset": sentences(20, 1), "privacy": PRIVACY, **options}
    return PrivateTrainer(model or gpt2(), arguments(folder, **(args or {})), **given)


@pytest.mark.nightly
def test_arguments_become_a_plan_an_optimizer_and_a_schedule(tmp_path: Path) -> None:
    args = {"max_grad_norm": 0.5, "weight_decay": 0.1, "warmup_steps": 2, "lr_scheduler_type": "cosine"}
    made = trainer(tmp_path, args=args)
    plan = hs.PrivacyPlan.calibrate(epsilon=4.0, delta=1e-4, population=200, batch_size=20, steps=4, max_grad_norm=0.5)
    assert made.plan == plan
    assert [group["weight_decay"] for group in made.trainer.optimizer.param_groups] == [0.1, 0.0]
    assert isinstance(made.trainer.optimizer, torch.optim.AdamW)
    assert made.trainer.optimizer.param_groups[0]["lr"] == 0.0  # the first step of the warm-up
    assert made.trainer.optimizer.param_groups[0]["initial_lr"] == 0.01
    by_epochs = trainer(tmp_path, args={"max_steps": -1, "num_train_epochs": 2.0})
    assert by_epochs.plan.steps == 20


@pytest.mark.nightly
def test_a_run_ends_with_a_model_that_transformers_loads(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    before = made.evaluate()
    result = made.train()
    assert result.stopped == "finished"
    assert result.epsilon() <= 4.0
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "model")
    for name, value in made.model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    assert made.evaluate() != before
    assert made.evaluate()["eval_perplexity"] == pytest.approx(torch.tensor(made.evaluate()["eval_loss"]).exp())
    again = trainer(tmp_path)
    assert again.train().updates == 4  # loaded, not trained
    for name, value in made.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_a_step_is_that_of_the_trainer(tmp_path: Path) -> None:
    """Oracle: `Trainer` with an optimizer made by hand, and the same known noise."""
    args = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 2.0}
    made = trainer(tmp_path, args=args)
    made.trainer.unsafe_seed = 5
    made.train()
    model = gpt2()
    private = hs.PrivateData(sentences(200, 0), example=sentences(1, 1).with_format("torch")[0])
    plan = hs.PrivacyPlan.calibrate(epsilon=4.0, delta=1e-4, population=200, batch_size=20, steps=4, max_grad_norm=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hs.Trainer(model, causal_loss, optimizer=optimizer, plan=plan, unsafe_seed=5).fit(private, run_dir=tmp_path / "b")
    for name, value in model.state_dict().items():
        assert torch.allclose(value, made.model.state_dict()[name], atol=1e-6), name


def masked(table: Any, *, rows: int = 0, tokens: int = 0) -> Any:
    """The labels of the first `rows` are masked, and of the others the first `tokens`."""
    labels = torch.tensor(table["labels"][:])
    labels[:, :tokens], labels[:rows] = -100, -100
    return table.remove_columns("labels").add_column("labels", labels.tolist())


@pytest.mark.parametrize("collated", [False, True], ids=["table", "collator"])
def test_rows_without_a_label_are_left_out_of_means_and_tokens_weigh_alike(tmp_path: Path, collated: bool) -> None:
    """Against transformers: the loss of the model itself is the mean over all tokens that count."""
    table = masked(sentences(20, 1), rows=8, tokens=1)
    uneven = datasets.concatenate_datasets([table, masked(sentences(5, 2), tokens=4)])
    collate: dict[str, Any] = {
        "data_collator": lambda rows: {k: torch.tensor([row[k] for row in rows]) for k in rows[0]}
    }
    made = trainer(tmp_path, eval_dataset=uneven, **(collate if collated else {}))
    found = made.evaluate()
    batch = {name: torch.tensor(uneven[name][:]) for name in ("input_ids", "labels")}
    with torch.no_grad():
        made.model.eval()
        per_token = float(made.model(**batch).loss.exp())
        per_row = causal_loss(made.model, batch)[8:]
    assert found["eval_perplexity_per_token"] == pytest.approx(per_token, rel=1e-5)
    assert found["eval_loss"] == pytest.approx(float(per_row.mean()), rel=1e-5)
    assert found["eval_perplexity"] == pytest.approx(float(per_row.mean().exp()), rel=1e-5)
    assert made.evaluate(uneven) == found
    assert made.train().history[-1]["loss"] == pytest.approx(made.evaluate()["eval_loss"], rel=1e-5)


def test_how_public_labels_are_masked_is_said_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path, eval_dataset=masked(sentences(20, 1), rows=5, tokens=2)).train()
    (line,) = [record.message for record in caplog.records if "have no label" in record.message]
    assert "In eval_dataset, 25% of rows have no label, and 40% of labels are masked." in line  # 15 x 4 of 100


@pytest.mark.parametrize("name", ["eval_dataset", "public_dataset"])
def test_public_rows_of_which_none_has_a_label_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"labels in {name}: no public row has a label other than -100"):
        trainer(tmp_path, **{name: masked(sentences(20, 1), rows=20)})
    first = sentences(20, 1).map(lambda row: {"labels": [row["labels"][0], *[-100] * (LENGTH - 1)]})
    with pytest.raises(ConfigError, match="no public row has a label other than -100"):
        trainer(tmp_path, **{name: first})  # the first token is predicted by nothing
    with pytest.raises(ConfigError, match="no public row has a label other than -100"):
        trainer(tmp_path).evaluate(masked(sentences(20, 1), rows=20))


def test_labels_of_another_loss_are_nobodys_business(tmp_path: Path) -> None:
    given = trainer(tmp_path, eval_dataset=masked(sentences(20, 1), rows=20), loss_fn=lambda m, b: causal_loss(m, b))
    assert given.evaluate() == {"eval_loss": 0.0}


def test_columns_that_the_model_does_not_take_are_left_out(tmp_path: Path) -> None:
    table = sentences(200, 0, text=["a"] * 200)
    assert trainer(tmp_path, train_dataset=table).train().stopped == "finished"


def test_a_collator_makes_each_row_by_itself(tmp_path: Path) -> None:
    seen: list[int] = []

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.append(len(rows))
        padded = [row["input_ids"] + [0] * (LENGTH + 2 - len(row["input_ids"])) for row in rows]
        ids = torch.tensor(padded)
        return {"input_ids": ids, "labels": torch.where(ids == 0, -100, ids)}

    size = {"vocab_size": WORDS, "n_positions": LENGTH + 2, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    assert trainer(tmp_path, model, data_collator=collate).train().stopped == "finished"
    assert set(seen) == {1}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"fp16": True}, "fp16=True"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}, "load_best"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"gradient_checkpointing": True}, "micro_batch_size"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"torch_compile": True}, "torch_compile"),
        ({"resume_from_checkpoint": "x"}, "by itself"),
        ({"auto_find_batch_size": True}, "part of the guarantee"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_hold_is_refused_with_the_reason(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, args=wrong)


def test_private_rows_are_not_evaluated(tmp_path: Path) -> None:
    private = sentences(200, 0)
    made = trainer(tmp_path, train_dataset=private)
    made.train()
    with pytest.raises(ConfigError, match="must be public"):
        made.evaluate(private)


@pytest.mark.parametrize("name", ["eval_dataset", "public_dataset"])
def test_private_rows_behind_a_collator_are_recognised(name: str, tmp_path: Path) -> None:
    private = sentences(200, 0)
    with pytest.raises(ConfigError, match=f"given as {name}"):
        trainer(tmp_path, train_dataset=private, data_collator=transformers.default_data_collator, **{name: private})
    made = trainer(tmp_path, train_dataset=private, data_collator=transformers.default_data_collator)
    with pytest.raises(ConfigError, match="must be public"):
        made.evaluate(private.select(range(10)))


def test_callbacks_are_told_of_released_values(tmp_path: Path) -> None:
    events: list[tuple[str, int]] = []

    class Note(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            events.append(("step", state.global_step))

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any) -> None:
            assert "eval_loss" in metrics
            events.append(("evaluate", state.global_step))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            assert set(logs) == {"learning_rate", "grad_norm", "epoch"}
            events.append(("log", state.global_step))

    trainer(tmp_path, args={"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 3}, callbacks=[Note]).train()
    assert [step for event, step in events if event == "step"] == [1, 2, 3, 4]
    assert [step for event, step in events if event == "evaluate"] == [2, 4]
    assert [step for event, step in events if event == "log"] == [3]


@pytest.mark.parametrize(
    ("args", "every"),
    [
        ({"eval_strategy": "no", "eval_steps": 2}, None),
        ({"eval_strategy": "steps", "eval_steps": 3}, 3),
        ({"eval_strategy": "steps", "eval_steps": 0.5}, 2),
        ({"eval_strategy": "epoch"}, 10),
    ],
    ids=str,
)
def test_how_often_it_evaluates(args: dict[str, Any], every: int | None, tmp_path: Path) -> None:
    made = trainer(tmp_path, args=args)
    assert made._every(made.args.eval_strategy, made.args.eval_steps) == every


@pytest.mark.parametrize("frozen", [False, True], ids=["", "A frozen"])
def test_of_lora_only_the_adapters_are_trained(frozen: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(gpt2(), config)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_B" in name)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = trainer(tmp_path, model)
    made.train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert moved == trained
    assert all("lora_" in name for name in moved)
    assert (tmp_path / "run" / "model" / "adapter_config.json").exists()


def test_the_loss_follows_from_the_class() -> None:
    size = {"vocab_size": WORDS, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = transformers.BertConfig(**size, num_hidden_layers=1)
    assert loss_of(gpt2()) is causal_loss
    assert loss_of(transformers.BertForSequenceClassification(config)) is sequence_loss
    assert loss_of(transformers.BertForMaskedLM(config)) is token_loss
    with pytest.raises(ConfigError, match="BertModel"):
        loss_of(transformers.BertModel(config))
