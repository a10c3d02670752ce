"""Forecast: seconds of a step before the run, with a ledger of where they go.

A profile (what is computed and sent, without a device) is traced from the model once; its price on a cluster is a pure
function.
"""

from ._batch import Batch as Batch
from ._beside import MeasuredStep as MeasuredStep
from ._beside import Told as Told
from ._beside import measure_step as measure_step
from ._calibrated import calibrated as calibrated
from ._forecast import Profiles as Profiles
from ._forecast import forecast as forecast
from ._forecast import forecast_profile as forecast_profile
from ._forecast import forecast_resolved as forecast_resolved
from ._forecast import profile_step as profile_step
from ._forward import decode_seconds as decode_seconds
from ._forward import forward_seconds as forward_seconds
from ._forward import gather_seconds as gather_seconds
from ._price import PartSeconds as PartSeconds
from ._price import Priced as Priced
from ._price import Prices as Prices
from ._price import price as price
from ._profile import Call as Call
from ._profile import ModelProfile as ModelProfile
from ._profile import Part as Part
from ._profile import Profile as Profile
from ._profile import StepProfile as StepProfile
from ._profiles import profile_model as profile_model
from ._result import Forecast as Forecast
