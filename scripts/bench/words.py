"""Common English words, which most tokenizers know whole."""

from typing import Final

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

WORDS: Final = tuple(_TEXT.split())
