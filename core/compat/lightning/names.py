"""Where each of Lightning's names leads, by module; and what to use instead of those that lead nowhere."""

from __future__ import annotations

# In each module of Lightning: packages of ours that have some of its names, and names that lead elsewhere.
SOURCES: dict[str, tuple[str, ...]] = {
    "pytorch.callbacks": ("trivet.callbacks",),
    "pytorch.loggers": ("trivet.loggers",),
    "pytorch.profilers": ("trivet.profilers",),
}

HERE = "trivet.compat.lightning"
MAIN = {
    "LightningModule": f"{HERE}.module:LightningModule",
    "LightningDataModule": f"{HERE}.datamodule:LightningDataModule",
    "Trainer": f"{HERE}.trainer:Trainer",
    "Callback": "trivet.callbacks.callback:Callback",
    "seed_everything": f"{HERE}.plugins:seed_everything",
}
RANK_ZERO = {
    name: f"{HERE}.utilities:{name}"
    for name in ("rank_zero_only", "rank_zero_info", "rank_zero_warn", "rank_zero_deprecation", "rank_zero_debug")
}
ANYTHING = (
    "STEP_OUTPUT", "EVAL_DATALOADERS", "TRAIN_DATALOADERS", "OptimizerLRScheduler", "LRSchedulerPLType",
    "LRSchedulerTypeUnion", "LRSchedulerConfig", "LRSchedulerConfigType", "_METRIC", "_PREDICT_OUTPUT",
    "_EVALUATE_OUTPUT", "OptimizerLRSchedulerConfig", "EPOCH_OUTPUT",
)  # fmt: skip


def plugins(*names: str) -> dict[str, str]:
    return {name: f"{HERE}.plugins:{name}" for name in names}


TARGETS: dict[str, dict[str, str]] = {
    "": MAIN,
    "pytorch": MAIN,
    "pytorch.core": {**MAIN, "LightningOptimizer": "torch.optim:Optimizer"},
    "pytorch.trainer": {"Trainer": MAIN["Trainer"]},
    "pytorch.callbacks": {
        "BasePredictionWriter": "trivet.callbacks.prediction_writer:PredictionWriter",
        "EarlyStopping": f"{HERE}.callbacks:EarlyStopping",
        "ModelCheckpoint": f"{HERE}.callbacks:ModelCheckpoint",
        "EarlyStoppingReason": "trivet.callbacks.early_stopping:EarlyStoppingReason",
    },
    "pytorch.loggers": {
        "CSVLogger": f"{HERE}.callbacks:CSVLogger",
        "TensorBoardLogger": f"{HERE}.callbacks:TensorBoardLogger",
        "rank_zero_experiment": f"{HERE}.utilities:rank_zero_experiment",
    },
    "pytorch.strategies": {
        "Strategy": "trivet.plugins:Strategy",
        **plugins("DDPStrategy", "FSDPStrategy", "DeepSpeedStrategy", "SingleDeviceStrategy"),
    },
    "pytorch.accelerators": {
        "Accelerator": "trivet.plugins:Accelerator",
        **plugins("CPUAccelerator", "CUDAAccelerator", "MPSAccelerator", "XLAAccelerator"),
    },
    "pytorch.plugins": {
        "Precision": "trivet.plugins:Precision",
        **plugins("MixedPrecision", "HalfPrecision", "DoublePrecision", "TorchSyncBatchNorm"),
    },
    "pytorch.cli": {
        **{
            name: f"{HERE}.cli:{name}"
            for name in ("LightningCLI", "LightningArgumentParser", "SaveConfigCallback", "ReduceLROnPlateau")
        },
        **dict.fromkeys(("ArgsType", "OptimizerCallable", "LRSchedulerCallable", "LRSchedulerTypeUnion"), "typing:Any"),
    },
    "pytorch.utilities": {
        **RANK_ZERO,
        **{n: f"{HERE}.utilities:{n}" for n in ("grad_norm", "isolate_rng", "is_overridden", "AttributeDict")},
        "CombinedLoader": "trivet.data.combined:CombinedLoader",
        "MisconfigurationException": "trivet.errors:ConfigurationError",
        "ModelSummary": "trivet.callbacks.summary:ModelSummary",
        "move_data_to_device": "trivet.data.transfer:to_device",
        "seed_everything": MAIN["seed_everything"],
        **dict.fromkeys(ANYTHING, "typing:Any"),
    },
    "fabric": {"seed_everything": MAIN["seed_everything"], **RANK_ZERO},
}
TARGETS["fabric.utilities"] = TARGETS["pytorch.utilities"]
TARGETS["fabric.loggers"] = TARGETS["pytorch.loggers"]

# The packages in which any module may be imported: its names are those of the longest known path above it.
PACKAGES = ("pytorch", "fabric")
CHILDREN = (
    *("accelerators", "callbacks", "cli", "core", "demos", "loggers", "loops", "overrides", "plugins", "profilers"),
    *("serve", "strategies", "trainer", "tuner", "utilities"),
)

LOGGER = (
    "Log with CSVLogger or TensorBoardLogger, or wrap its client in a subclass of trivet.Logger: log_metrics(metrics, "
    "step) is all that it needs."
)
REGISTRY = (
    "Plugins are found by the entry points of installed packages: `trivet plugins new KIND NAME` writes one, and "
    "`trivet plugins` lists what there is."
)
ENVIRONMENT = (
    "Trivet finds out by itself who started the processes; leave it out. A cluster of your own is a trivet.Environment."
)
CHECKPOINTS = "A checkpoint is a directory that any strategy reads and writes, with no plugin in between; leave it out."
LOOP = "There is one loop, core/loop.py, and nothing in it to replace. Use hooks, a trivet.Callback, or trivet.Runtime."

INSTEAD: dict[str, str] = {
    **dict.fromkeys(("Fabric", "LightningLite"), "For a loop of your own use trivet.Runtime(strategy=...)."),
    "Tuner": "There is no search for a learning rate or a batch size. Give them as arguments and try some.",
    "LearningRateFinder": "There is no search for a learning rate. Give it as an argument and try some.",
    "BatchSizeFinder": "There is no search for a batch size. Trainer(global_batch_size=...) keeps an update's size.",
    "ModelPruning": "Prune with torch.nn.utils.prune in a trivet.Callback's on_train_epoch_end.",
    "SpikeDetection": "Return None from training_step to skip a batch; several ranks need Trainer(on_skip='update').",
    **dict.fromkeys(("WandbLogger", "MLFlowLogger", "CometLogger", "LitLogger", "NeptuneLogger"), LOGGER),
    **dict.fromkeys(("StrategyRegistry", "AcceleratorRegistry"), REGISTRY),
    "ParallelStrategy": "Subclass trivet.Strategy: its defaults average gradients over all processes.",
    "ModelParallelStrategy": "Shard with strategy='fsdp'. There is no tensor parallelism.",
    "XLAStrategy": "Use accelerator='xla' with strategy='ddp' on TPUs, or 'xla-fsdp' in one process (trivet[xla]).",
    "SingleDeviceXLAStrategy": "Use accelerator='xla' with strategy='single' (trivet[xla]).",
    **dict.fromkeys(
        ("CheckpointIO", "TorchCheckpointIO", "XLACheckpointIO"),
        CHECKPOINTS,
    ),
    "AsyncCheckpointIO": "Use trivet.callbacks.Checkpoint(save_async=True), which writes while training goes on.",
    **dict.fromkeys(
        ("TrainerFn", "TrainerStatus", "TrainerState", "RunningStage"),
        "trainer.stage is 'fit', 'sanity_check', 'validate', 'test', 'predict' or ''.",
    ),
    **dict.fromkeys(
        ("ModelHooks", "DataHooks", "CheckpointHooks", "HyperparametersMixin"),
        "Derive from LightningModule or LightningDataModule, which have these methods.",
    ),
    "GradClipAlgorithmType": "Write 'norm' or 'value'.",
    "LightningEnum": "Use enum.StrEnum.",
    "summarize": "Use the callback ModelSummary(max_depth=...).",
    **dict.fromkeys(
        (
            *("ClusterEnvironment", "LightningEnvironment", "TorchElasticEnvironment", "SLURMEnvironment"),
            *("LSFEnvironment", "MPIEnvironment", "KubeflowEnvironment", "XLAEnvironment"),
        ),
        ENVIRONMENT,
    ),
    "LayerSync": "Use Trainer(sync_batchnorm=True).",
    "BitsandbytesPrecision": "Quantise the layers in configure_model, or write a trivet.Precision.",
    "TransformerEnginePrecision": "Use precision='bf16-mixed', or write a trivet.Precision.",
    **dict.fromkeys(
        ("DeepSpeedPrecision", "FSDPPrecision", "XLAPrecision"),
        "A precision goes with any strategy that can carry it: Trainer(precision='bf16-mixed').",
    ),
    "XLAProfiler": "Use PyTorchProfiler.",
    "find_usable_cuda_devices": "Use Trainer(devices=N); CUDA_VISIBLE_DEVICES chooses among them.",
    **dict.fromkeys(("Loop", "_Loop", "FitLoop", "_FitLoop", "EvaluationLoop", "PredictionLoop"), LOOP),
    **dict.fromkeys(
        ("BoringModel", "BoringDataModule", "RandomDataset", "DemoModel", "Transformer", "WikiText2"),
        "Write a small trivet.Module: docs/tutorial.md begins with one.",
    ),
    "ServableModule": "Load the module with load_from_checkpoint and serve it with what you like.",
    "instantiate_class": "Use jsonargparse's ArgumentParser.instantiate.",
    "convert_zero_checkpoint_to_fp32_state_dict": (
        "Checkpoints hold the weights by name: trivet.checkpoint.directory.read_weights(path)."
    ),
    "suggested_max_num_workers": "Use os.cpu_count().",
    "measure_flops": "Use torch.utils.flop_counter.FlopCounterMode.",
}
