"""Models: a decoder-only language model, dense or with a mixture of experts."""

from flax_mesh.models.config import DecoderConfig as DecoderConfig
from flax_mesh.models.decoder import Decoder as Decoder
from flax_mesh.models.decoder import make_decoder as make_decoder
from flax_mesh.models.generation.generate import Generated as Generated
from flax_mesh.models.generation.generate import generate as generate
from flax_mesh.models.generation.generate import sample as sample
from flax_mesh.models.generation.report import SpeedReport as SpeedReport
from flax_mesh.models.load import load_decoder as load_decoder
from flax_mesh.models.load import pretrained_config as pretrained_config
from flax_mesh.models.loss import distillation_loss as distillation_loss
from flax_mesh.models.loss import flops_per_token as flops_per_token
from flax_mesh.models.loss import next_token_loss as next_token_loss
from flax_mesh.models.loss import token_log_probs as token_log_probs
from flax_mesh.models.ops.sampling import Sampling as Sampling
