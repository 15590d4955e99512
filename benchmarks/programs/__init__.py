"""Programs people train, small, in the manner of well-known tutorials: `benchmarks.coverage` runs them against the law."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.coverage_models import Training
from benchmarks.programs import contrasts, decisions, generative, likelihoods, regimes, sequences, tables, vision

FLOAT32 = frozenset(
    {"Augmentation in the model", "OCR", "Speech transformer, CTC"}
)  # Keras and TensorFlow fail there in float64

PROGRAMS: dict[str, Callable[[], Training]] = {
    "VAE": generative.vae,
    "GAN, two optimizers": generative.gan,
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
    "Speech transformer, CTC": sequences.speech_transformer,
    "Switch transformer": sequences.switch_transformer,
    "Expert choice": sequences.expert_choice,
    "Two towers": tables.two_towers,
    "TabTransformer": tables.tab_transformer,
    "Message passing": tables.message_passing,
    "Citation graph": tables.citation_graph,
    "Hashed crosses": tables.wide_lookup,
    "DQN": decisions.dqn,
    "PPO": decisions.ppo,
    "Actor-critic": decisions.actor_critic,
}
