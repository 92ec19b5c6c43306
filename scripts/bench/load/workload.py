"""What clients say: text from a seed, in conversations that begin differently.

A prefix cache must find nothing by accident, so every first question begins with words of its own,
other ones in each round and in the warm-up; what is to be shared is shared by its scenario.
Lengths are in words, about as many as tokens; reports have the tokens that the server counted.
"""

import random
from dataclasses import dataclass
from typing import Final

# Common, so that most tokenizers have a token for each.
_TEXT: Final = """
apple arch arrow autumn baker bank barn basket beach bean bear bell bench berry bird blanket
boat book boot border bottle bowl branch bread breeze brick bridge broom brush bucket butter
button cabin cake camera candle canvas canyon captain card carpet castle cat cave cellar chair
chalk cheese cherry chess chicken circle city clay cliff clock cloth cloud coast coat coffee
coin copper coral corn cottage cotton cousin cow crane cream creek crown cup curtain dance
dawn desert desk dinner dog door dove dragon drum duck dust eagle earth east echo edge egg
elbow elephant engine evening falcon farm farmer fence fern ferry field fig finger fire fish
flag flame flood floor flour flower flute fog forest fork fountain fox frame frost fruit
garden garlic gate ghost giant ginger glass glove goat gold goose grain grape grass gravel
guitar hammer harbor hat hay hazel hedge hill honey hook horn horse hotel house ice ink iron
island ivory ivy jacket jar jewel journey juice jungle kettle key king kitchen kite knife
ladder lake lamb lamp lantern lawn leaf leather lemon letter library lily lime lion lizard
lobster log lunch maple marble market meadow melon mill mint mirror monkey moon morning moss
mountain mouse mud museum music needle nest night north nurse oak ocean olive onion orange
orchard oven owl oyster paint palace palm paper parrot path peach pearl pencil pepper piano
pigeon pillow pine pipe planet plate plum pocket pond pony poppy porch potato prince pumpkin
puzzle queen quiet rabbit railway rain raven ribbon rice ridge ring river road robin rocket
roof rope rose sail salt sand scarf school seed shadow sheep shell shelf ship shoe shore
silk silver sister snow soap soil song soup spice spider spoon spring square stable stair
star station stone storm stove straw stream street sugar summer sun swan table tailor tea
temple tent thread thunder tiger timber toast tomato tower town trail train tree tulip tunnel
turtle uncle valley velvet village vine violin voyage wagon wall walnut water wave wax well
west whale wheat wheel willow window wine winter wolf wood wool yard
"""
WORDS: Final = _TEXT.split()
# Four of some 350 words: practically never the same twice.
_OPENING_WORDS: Final = 4
_SENTENCE_WORDS: Final = 12
# Completions shall reach the token limit, so that all servers generate as many tokens.
_REQUEST: Final = "Tell a very long and detailed story about all of this."


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one user asks, turn by turn; most conversations have one turn."""

    questions: tuple[str, ...]
    system: str | None = None


class Writer:
    """Writes texts of common words; the same label gives the same texts."""

    def __init__(self, label: str) -> None:
        self._rng = random.Random(label)

    def question(self, num_words: int) -> str:
        """Return a text with words of its own first and a request for a long completion last."""
        return f"{self.text(num_words - len(_REQUEST.split()))} {_REQUEST}"

    def text(self, num_words: int) -> str:
        """Return sentences; the first is short, so that what makes it differ comes first."""
        words = self._rng.choices(WORDS, k=max(num_words, _OPENING_WORDS))
        starts = range(_OPENING_WORDS, len(words), _SENTENCE_WORDS)
        sentences = [words[:_OPENING_WORDS], *(words[s : s + _SENTENCE_WORDS] for s in starts)]
        return " ".join(map(_sentence, sentences))


def _sentence(words: list[str]) -> str:
    return f"{' '.join(words).capitalize()}."
