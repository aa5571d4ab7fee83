"""Runs transformers' models that hold an nn.LSTM or nn.GRUCell, from small configurations."""

import torch
import transformers
from comparing import compare

BATCH, FRAMES = 2, 160
ENCODER = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "subsampling_conv_channels": 16, "num_mel_bins": 80,
}  # fmt: skip


def encodec():
    """Two seconds of sound to codes' vectors and back; the codec of Bark and MusicGen, too."""
    model = transformers.EncodecModel(transformers.EncodecConfig(num_filters=16, hidden_size=64))
    sound = 0.1 * torch.randn(BATCH, 1, 48000)
    return model, lambda model: model.decoder(model.encoder(sound.to(model.device)))


def transducer(kind, text):
    """A speech recognizer: its encoder, its LSTM over `text` tokens, and their joint network."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=501, blank_token_id=500, decoder_hidden_size=320, encoder_config=ENCODER
    )
    head = "ForTDT" if kind.endswith("TDT") else "ForRNNT"
    model = getattr(transformers, kind.removesuffix("TDT") + head)(config)
    sound, tokens = torch.randn(BATCH, FRAMES, 80), torch.randint(500, (BATCH, text))

    def run(model):
        device = model.device
        encoded = model.get_audio_features(sound.to(device)).pooler_output
        decoded = model.decoder(tokens.to(device))
        joint = model.joint(
            encoder_hidden_states=encoded[:, :, None], decoder_hidden_states=decoded[:, None]
        )
        return joint.flatten()

    return model, run


def table_recognizer(kind):
    """The head that writes a table's structure, a GRUCell and attention at every symbol."""
    config = getattr(transformers, f"{kind}Config")(max_text_length=60)
    package = getattr(transformers.models, kind.lower())
    model = getattr(package, f"modeling_{kind.lower()}")
    model = getattr(model, f"{kind}SLAHead")(config)
    # The next symbol is an argmax, which a rounding error must not change.
    torch.nn.init.normal_(model.structure_generator.fc2.weight, std=1.0)
    features = torch.randn(BATCH, 256, config.post_conv_out_channels)
    return model, lambda model: model(features.to(model.device)).last_hidden_state


MODELS = {
    "EnCodec": encodec,
    "Parakeet TDT": lambda: transducer("ParakeetTDT", 100),
    "Nemotron ASR streaming": lambda: transducer("NemotronAsrStreaming", 100),
    "Nemotron 3.5 ASR": lambda: transducer("Nemotron3_5Asr", 100),
    "SLANet": lambda: table_recognizer("SLANet"),
    "SLANeXt": lambda: table_recognizer("SLANeXt"),
}

if __name__ == "__main__":
    compare(MODELS)
