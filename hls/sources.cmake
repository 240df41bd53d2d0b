# Generates the kernels' sources when CMake configures. Needs Python_EXECUTABLE; sets CARD_SOURCES and CARD_INCLUDE, the
# folders of the headers for a simulation of the kernels.
get_filename_component(REPOSITORY ${CMAKE_CURRENT_LIST_DIR}/.. ABSOLUTE)
set(CARD_FOLDER ${CMAKE_CURRENT_BINARY_DIR}/generated/card)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
  ${REPOSITORY}/lightning_smartinfinity/common/update_rules.py ${REPOSITORY}/hls/description.py ${REPOSITORY}/hls/sources.py)
execute_process(
  COMMAND ${Python_EXECUTABLE} -m hls.generate sources ${CARD_FOLDER}
  WORKING_DIRECTORY ${REPOSITORY}
  COMMAND_ERROR_IS_FATAL ANY)
file(GLOB CARD_SOURCES ${CARD_FOLDER}/*.cpp)
set(CARD_INCLUDE
  ${REPOSITORY}/hls/include ${REPOSITORY}/hls/kernels ${REPOSITORY}/hls/sim/include ${CARD_FOLDER})
