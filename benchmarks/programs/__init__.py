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
LESS_SHARDED: dict[str, tuple[float, str]] = {}
