"""Programs that people train, small, in the manner of well-known tutorials. `benchmarks.coverage` runs them."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.coverage_models import Training
from benchmarks.programs import (
    contrasts,
    decisions,
    generative,
    likelihoods,
    regimes,
    sciences,
    sequences,
    tables,
    vision,
)

# What exists in float32 only, in TensorFlow or in Keras: differences are at rounding of that.
FLOAT32 = frozenset(
    {
        "Augmentation in the model",
        "Metrics",
        "OCR",
        "Quantization",
        "Region head",
        "Speech transformer with CTC",
    }
)

PROGRAMS: dict[str, Callable[[], Training]] = {
    "VAE": generative.vae,
    "GAN with two optimizers": generative.gan,
    "WGAN-GP": generative.wgan_gp,
    "CycleGAN": generative.cycle_gan,
    "DDIM": likelihoods.ddim,
    "PixelCNN": likelihoods.pixel_cnn,
    "RealNVP": likelihoods.real_nvp,
    "VQ-VAE": likelihoods.vq_vae,
    "NeRF": vision.nerf,
    "Swin": vision.swin,
    "RetinaNet": vision.retina_net,
    "OCR": vision.ocr,
    "Barlow twins": contrasts.barlow_twins,
    "SimSiam": contrasts.sim_siam,
    "NNCLR": contrasts.nnclr,
    "CLIP": contrasts.clip,
    "Supervised contrastive": contrasts.supervised_contrastive,
    "Distillation": regimes.distillation,
    "FixMatch": regimes.fix_match,
    "MixUp": regimes.mix_up,
    "Augmentation in the model": regimes.augmented,
    "Gradient accumulation": regimes.accumulated,
    "EMA of the weights": regimes.averaged,
    "Mean teacher": regimes.mean_teacher,
    "Speech transformer with CTC": sequences.speech_transformer,
    "Switch transformer": sequences.switch_transformer,
    "Expert choice": sequences.expert_choice,
    "Two towers": tables.two_towers,
    "TabTransformer": tables.tab_transformer,
    "Message passing": tables.message_passing,
    "Citation graph": tables.citation_graph,
    "Hashed crosses": tables.wide_lookup,
    "Heat equation": sciences.heat_equation,
    "PointNet": sciences.point_net,
    "Sound classifier": sciences.sound_classifier,
    "Style transfer": sciences.style_transfer,
    "Meta-learning": sciences.meta_learning,
    "Gaussian processes": sciences.gaussian_features,
    "Masked autoencoder": sciences.masked_autoencoder,
    "Region head": sciences.region_head,
    "Quantization": sciences.quantized,
    "Metrics": sciences.measured,
    "Translator": sciences.translator,
    "Next frame": sciences.next_frame,
    "DQN": decisions.dqn,
    "PPO": decisions.ppo,
    "Actor-critic": decisions.actor_critic,
}

# What of these does not run on the shards: at least which share of their FLOPs does, and what the rest is.
LESS_SHARDED: dict[str, tuple[float, str]] = {
    "GAN with two optimizers": (
        0.2,
        "The noise has the rows of the batch, but is drawn inside of the step: planning lets rows flow from arguments "
        "only, so the generator runs at home.",
    ),
    "WGAN-GP": (0.5, "As in the GAN: rows that are born inside of the step."),
    "CLIP": (
        0.98,
        "The transposed scores are cut along their columns, and cross-entropy needs whole rows: planning gathers them "
        "at home where it could exchange them between devices (all-to-all).",
    ),
    "Masked autoencoder": (
        0.97,
        "The gradient of `tf.gather(..., batch_dims=1)` numbers segments in the whole batch: each device makes a sum "
        "as large as the batch, and these are added up, although each shard's numbers are those of its own rows.",
    ),
    "Region head": (
        0.98,
        "Boxes say by a number which image they are of, so the gradients of all images are added up over the devices, "
        "although each shard's boxes are those of its own images.",
    ),
    "Meta-learning": (
        0.0,
        "`tf.map_fn` makes a list of the rows, and lists are cut along the axes of their elements only.",
    ),
    "OCR": (
        0.99,
        "The loops of the CTC loss run at home: what they only read is made whole, and read in pieces by their "
        "bodies. They count once here, though they turn once for each frame: the true share is smaller.",
    ),
    "Speech transformer with CTC": (0.99, "As in OCR: the loops of the CTC loss."),
    "Message passing": (
        0.89,
        "Messages summed by segment are one sum of all devices, made whole at home; what follows it alone (a matrix "
        "product of the gate) is not split again.",
    ),
    "Citation graph": (
        0.5,
        "A fact: one graph for the whole run is no batch; every step works on all of its nodes once.",
    ),
}
